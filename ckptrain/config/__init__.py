"""What did the user ask for? The configuration, the base model's shape, and what follows from the two.

Every other room may import this one; it imports `errors` alone, and never torch, so that a plan is told at once. No
weight is loaded here.
"""
