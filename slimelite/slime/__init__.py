"""What plugins of slime import and expect."""
