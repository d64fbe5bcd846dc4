#!/bin/sh
# Makes the certificates of the tests anew: an authority, a server (localhost, 127.0.0.1, ::1), a client, a server of
# another name, and a server whose authority nobody here trusts. They last for a hundred years, and prove nothing.
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
signed() { # name, common name, authority, extensions
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$2" -keyout "$1.key" -out "$work/$1.csr"
    printf '%s\n' "$4" >"$work/extensions"
    openssl x509 -req -in "$work/$1.csr" -CA "$3.pem" -CAkey "$work/$3.key" -days 36500 -extfile "$work/extensions" -out "$1.pem"
}
for authority in authority stranger; do
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500 -subj "/CN=PortalMQ's tests: $authority" \
        -keyout "$work/$authority.key" -out "$authority.pem"
done
signed server localhost authority "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1"
signed client client authority "extendedKeyUsage=clientAuth"
signed elsewhere elsewhere.example authority "subjectAltName=DNS:elsewhere.example"
signed untrusted localhost stranger "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1"
