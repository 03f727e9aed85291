"""Folders of policies from other libraries, and a trainer of policies that are served."""
