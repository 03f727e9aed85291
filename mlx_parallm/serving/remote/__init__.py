"""The engines as HTTP processes see them: the same requests and events, over a socket."""
