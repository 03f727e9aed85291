"""Small nets and policies: rows of all requests of one net in one forward."""
