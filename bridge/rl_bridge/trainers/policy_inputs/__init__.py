"""What a step of the policy trainer is made of, one idea a file."""
