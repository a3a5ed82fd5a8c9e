"""`eagletwin compare BASE HEAD`: what a pull request of SGLang breaks and fixes, told by cases that run on both sides."""
