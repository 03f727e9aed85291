"""``/v1/fine_tuning/jobs``, as OpenAI's SDK speaks it."""
