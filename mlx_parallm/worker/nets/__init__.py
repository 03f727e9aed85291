"""Small nets on the device."""
