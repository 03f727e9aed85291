"""Files of images, taken apart without decoding: sizes, frames, orientation and pixel data."""
