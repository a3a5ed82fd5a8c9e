"""`eagletwin compare BASE HEAD`: what a pull request of an engine breaks and fixes, told by cases that run on both sides."""
