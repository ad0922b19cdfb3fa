"""The arithmetic of a decoder: a small op set with interchangeable backends, chosen once at start (`select.py`)."""
