"""What to serve next, and how hard to push back: policy alone, on whatever clock it is given."""
