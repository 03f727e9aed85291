"""Models that read texts: which inputs run next, and results kept from before."""
