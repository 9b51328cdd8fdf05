"""The modules and names that slime's plugins import."""
