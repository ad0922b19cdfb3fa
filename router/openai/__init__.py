"""The OpenAI API as we speak it: what a body may hold, what an answer looks like, server-sent events."""
