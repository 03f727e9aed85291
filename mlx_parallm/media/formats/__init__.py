"""Files of pictures, taken apart without decoding: sizes, frames, orientation and pixel data."""
