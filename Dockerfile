# docker build -t nerfturbo .                          with CUDA: run it with --gpus all
# docker build -t nerfturbo --build-arg DEVICE=cpu .   without: gigabytes smaller
# docker run --rm -v "$PWD:/work" -p 7007:7007 nerfturbo train photos/ --viewer --viewer-host 0.0.0.0
FROM python:3.12-slim-bookworm
ARG DEVICE=cuda

# Triton compiles its launcher at run time, so the CUDA image holds a C compiler; colmap finds the poses of photos.
RUN apt-get update \
 && apt-get install -y --no-install-recommends colmap ffmpeg $([ "$DEVICE" = cpu ] || echo gcc libc6-dev) \
 && rm -rf /var/lib/apt/lists/*

COPY . /src
RUN cd /src \
 && pip install --no-cache-dir $([ "$DEVICE" = cpu ] && echo -c constraints-cpu.txt) ".[viewer,video,mesh,heic,check,monitor]" \
 && rm -rf /src

RUN useradd --create-home --uid 1000 nerf
USER nerf
WORKDIR /work
EXPOSE 7007
ENTRYPOINT ["nerfturbo"]
CMD ["--help"]
