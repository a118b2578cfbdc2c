"""What a file holds, without its tensors; and files whose tensors come from other files."""
