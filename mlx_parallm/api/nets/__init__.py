"""Routes of nets and policies."""
