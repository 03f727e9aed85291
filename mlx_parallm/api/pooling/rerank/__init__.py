"""Documents sorted by a query: Jina, Cohere, vLLM and TEI."""
