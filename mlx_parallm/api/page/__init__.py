"""The page at ``/``, and the API's documentation."""
