#!/bin/sh
# Makes the certificates of the tests again: an authority, a server (localhost, 127.0.0.1, ::1), a client, a server of
# another name, and a server whose authority no test trusts. They are valid from 2000 to 2126, for any clock of the
# machine, and protect nothing. They satisfy X509_STRICT, which Python 3.13 requires.
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/ca.cnf" <<END
[ca]
default_ca = tests
[tests]
database = $work/index
serial = $work/serial
new_certs_dir = $work
default_md = sha256
unique_subject = no
policy = names
[names]
commonName = supplied
END
: >"$work/index"
echo "$(openssl rand -hex 8)" | sed 's/^./1/' >"$work/serial"
made() { # name, common name, extensions, signing options
    name=$1 subject=$2
    printf '%s\n' "$3" >"$work/extensions"
    shift 3
    openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$subject" \
        -keyout "$work/$name.key" -out "$work/$name.csr"
    openssl ca -batch -notext -config "$work/ca.cnf" -startdate 20000101000000Z -enddate 21260101000000Z \
        -extfile "$work/extensions" -in "$work/$name.csr" -out "$name.pem" "$@"
}
signed() { # name, common name, authority, extensions
    made "$1" "$2" "$4
basicConstraints=CA:FALSE
subjectKeyIdentifier=hash
authorityKeyIdentifier=keyid" -cert "$3.pem" -keyfile "$work/$3.key"
    cp "$work/$1.key" "$1.key"
}
for authority in authority stranger; do
    made "$authority" "PortalMQ's tests: $authority" "basicConstraints=critical,CA:TRUE
keyUsage=critical,keyCertSign,cRLSign
subjectKeyIdentifier=hash" -selfsign -keyfile "$work/$authority.key"
done
signed server localhost authority "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1"
signed client client authority "extendedKeyUsage=clientAuth"
signed elsewhere elsewhere.example authority "subjectAltName=DNS:elsewhere.example"
signed untrusted localhost stranger "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1"
