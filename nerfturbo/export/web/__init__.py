"""A trained scene as one web page: baked into sparse blocks of 8-bit texels and ray marched by the browser's WebGL2."""
