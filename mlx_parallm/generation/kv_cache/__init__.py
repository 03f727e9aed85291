"""Bookkeeping of KV blocks: pool, tables, prefix cache. Pure Python; no array is touched here."""
