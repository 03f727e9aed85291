"""The models that come with the package, as folders in Hugging Face's form."""
