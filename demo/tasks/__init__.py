"""One module per family of tasks; each task is a function from a random generator to an Example."""
