"""What models and accelerators are: their figures, each with where it comes from.

Nothing here computes how long something takes; that is `cost`.
"""
