"""The classes that Ray Serve starts: the ingress, and one worker replica of a pool."""
