"""SGLang's API: generation, and the form of answers of its control routes."""
