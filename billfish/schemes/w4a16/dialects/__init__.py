"""Public file formats that hold the numbers of w4a16, to and from canonical tensors."""
