"""Several engines of the same models: which one gets a request, and how all of them change."""
