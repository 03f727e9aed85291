"""Plain Python types that the stages exchange: requests, batches, events, results, errors."""
