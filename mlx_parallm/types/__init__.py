"""What travels between the stages: requests, batches, events, results, errors. Plain Python."""
