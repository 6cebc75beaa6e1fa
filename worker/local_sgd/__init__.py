"""Local SGD: workers train by themselves, and average what their parameters have changed by every few steps."""
