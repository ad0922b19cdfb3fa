"""The front door: the OpenAI API, one queue, the ingress's end of the front link, and the only judge of retries."""
