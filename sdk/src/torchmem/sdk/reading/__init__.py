"""What is read from every device, and what is kept between reads."""
