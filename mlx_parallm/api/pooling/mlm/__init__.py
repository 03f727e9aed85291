"""What masked LMs say of masks and of whole texts."""
