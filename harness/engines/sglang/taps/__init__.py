"""What is recorded of a worker. taps.py stands around whole stages and explains a round; inner.py stands around forwards."""
