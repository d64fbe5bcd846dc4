# A broker, and every other command of `portalmq`: `docker build -t portalmq .`
# One image builds the wheels and another runs them, so the second contains no compiler and no source. glibc, not musl:
# the wheels of apsw, gevent and msgspec need it.

FROM python:3.12-slim AS build
WORKDIR /src
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY client_api client_api
COPY broker broker
COPY control_plane control_plane
COPY demo_iot demo_iot
COPY spark spark
RUN pip wheel --no-cache-dir --disable-pip-version-check --wheel-dir /wheels ".[broker]"

FROM python:3.12-slim
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --disable-pip-version-check --no-index --find-links /wheels "portalmq[broker]" \
    && useradd --system --uid 10001 --user-group --home-dir /var/lib/portalmq --create-home portalmq
USER portalmq
WORKDIR /var/lib/portalmq
VOLUME /var/lib/portalmq

# In a container, loopback reaches only the container itself, so the broker listens on all addresses. It then requires
# PORTALMQ_TOKEN_FILE, or PORTALMQ_INSECURE=true in a trusted network.
ENV PORTALMQ_HOST=0.0.0.0 \
    PORTALMQ_PORT=5000 \
    PORTALMQ_DATA_DIR=/var/lib/portalmq \
    PYTHONUNBUFFERED=1
EXPOSE 5000
HEALTHCHECK --interval=5s --timeout=4s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as url; url.urlopen(f'http://127.0.0.1:{os.environ[\"PORTALMQ_PORT\"]}/readyz', timeout=3)"]

# The broker is process 1, so `docker stop` reaches it: on SIGTERM it hands its leaderships over and exits with 0.
STOPSIGNAL SIGTERM
ENTRYPOINT ["portalmq"]
CMD ["broker"]
