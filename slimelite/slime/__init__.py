"""The names that slime's plugins import and expect."""
