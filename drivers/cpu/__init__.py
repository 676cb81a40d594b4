"""The host's processor as a device."""
