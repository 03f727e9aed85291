#!/bin/sh
# SGLang's router before two servers: pip install sglang-router==0.3.2
# API_KEY is a key of the servers, with which the router asks for their models.
#
# Its circuit breaker is off: it takes a client's bad request (400) for a failure of the server.
# It repeats requests that failed, also those that a server had begun; --disable-retries in place of
# the two options for retries repeats none, and more fail until a dead server is noticed.
exec python3 -m sglang_router.launch_router \
    --host 0.0.0.0 --port 8080 --worker-startup-check-interval 1 \
    --worker-urls http://10.0.0.11:8000 http://10.0.0.12:8000 ${API_KEY:+--api-key "$API_KEY"} \
    --policy manual --assignment-mode min_load \
    --disable-circuit-breaker --retry-max-retries 3 --retry-initial-backoff-ms 200 \
    --health-check-endpoint /ready --health-check-interval-secs 1 --health-failure-threshold 1 \
    --health-check-timeout-secs 2 --prometheus-host 127.0.0.1 --prometheus-port 29000
