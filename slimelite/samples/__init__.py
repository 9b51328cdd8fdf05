"""The data that all parts of a run exchange: samples, and the table of samples."""
