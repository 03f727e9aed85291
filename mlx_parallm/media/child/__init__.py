"""Processes of their own that read the files whose readers may crash."""
