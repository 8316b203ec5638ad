# debian:bookworm-slim as published: no documentation, no caches. Also this machine's certificates and settings of pip.
FROM headrace-stand-in/rootfs
COPY certificates /usr/local/share/ca-certificates
COPY pip.conf /etc/pip.conf
RUN update-ca-certificates
