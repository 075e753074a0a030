//! TLS over TCP, with libnbd's clients (GnuTLS) on the other side.

mod common;

use common::{few, have, noise};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use weir_core::log::{Level, to_stderr};
use weir_export::nbd::{Config, Identity, Listen, ServeError, Server};
use weir_store::Host;
use weir_volume::Volume;

/// A directory with a certificate authority, a server's certificate and a client's; it is removed
/// when the test ends.
struct Certificates(PathBuf);

impl Certificates {
    fn new(name: &str) -> Option<Certificates> {
        let directory = std::env::temp_dir().join(format!("weir-tls-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let certificates = Certificates(directory);
        let made = Command::new("sh").current_dir(&certificates.0).arg("-ec").arg(MAKE_CERTIFICATES).output();
        if made.is_ok_and(|output| output.status.success()) {
            return Some(certificates);
        }
        eprintln!("skipped: openssl makes no certificates here (apt-get install openssl)");
        None
    }
}

impl Drop for Certificates {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const MAKE_CERTIFICATES: &str = r#"
new="openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
$new -x509 -days 2 -subj /CN=weir-test-ca -keyout ca-key.pem -out ca-cert.pem
for who in server client; do
  $new -subj /CN=localhost -keyout $who-key.pem -out $who.csr
  printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n' > $who.ext
  openssl x509 -req -days 2 -in $who.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial \
    -extfile $who.ext -out $who-cert.pem
done
"#;

fn volume(pages: u32) -> Arc<Volume> {
    let shape = weir_volume::Config { pages, lanes: 2, depth: 16 };
    Volume::create(shape, vec![Arc::new(Host::new(shape.slots()).unwrap())]).unwrap()
}

fn start(volume: &Arc<Volume>, certificates: &Path) -> Server {
    let identity = Arc::new(Identity::from_directory(certificates).unwrap());
    let listen = [Listen::Tls { host: "127.0.0.1".into(), port: 0, identity }];
    Server::start(volume, &Config { connections: 2, ..few() }, &listen, &to_stderr(Level::Warning)).unwrap()
}

fn port(server: &Server) -> String {
    server.addresses()[0].to_string().rsplit(':').next().unwrap().to_owned()
}

#[test]
fn an_image_goes_in_and_out_under_tls_and_nothing_goes_without() {
    let Some(certificates) = Certificates::new("copy") else { return };
    if !have("nbdcopy", "libnbd-bin") {
        return;
    }
    let server = start(&volume(4096), &certificates.0);
    let uri = |scheme: &str| {
        format!("{scheme}://127.0.0.1:{}/weir?tls-certificates={}", port(&server), certificates.0.display())
    };
    let (from, to) = (certificates.0.join("in"), certificates.0.join("out"));
    std::fs::write(&from, noise(1, 16 << 20)).unwrap();
    for (source, destination) in
        [(from.display().to_string(), uri("nbds")), (uri("nbds"), to.display().to_string())]
    {
        let output =
            Command::new("nbdcopy").args(["--connections=1", &source, &destination]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert!(std::fs::read(from).unwrap() == std::fs::read(to).unwrap());

    let clear = Command::new("nbdinfo").arg(uri("nbd")).output().unwrap();
    assert!(!clear.status.success(), "it was served without TLS");
    server.shutdown(common::PATIENCE);
}

#[test]
fn bytes_in_the_clear_do_not_count_as_said_inside_tls() {
    let Some(certificates) = Certificates::new("inject") else { return };
    let server = start(&volume(256), &certificates.0);
    let mut stream = TcpStream::connect(("127.0.0.1", port(&server).parse().unwrap())).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    let option = |number: u32| [&b"IHAVEOPT"[..], &number.to_be_bytes(), &[0; 4]].concat();
    stream.write_all(&[&3u32.to_be_bytes()[..], &option(5), &option(8)].concat()).unwrap();
    let mut said = Vec::new();
    let _ = stream.read_to_end(&mut said);
    assert_eq!(said.len(), 20, "the acknowledgement of STARTTLS, and then nothing");
    server.shutdown(common::PATIENCE);
}

#[test]
fn a_key_that_cannot_be_used_is_named_with_those_that_can() {
    let Some(certificates) = Certificates::new("keys") else { return };
    // 1024 bits are too few, and 2432 (GnuTLS's choice for "medium") is a size that ring does not
    // support.
    for bits in ["1024", "2432", "2048"] {
        let key = certificates.0.join("server-key.pem");
        let make = [
            "openssl req -x509 -nodes -subj /CN=localhost -keyout server-key.pem -out server-cert.pem -newkey rsa:",
            bits,
        ];
        let made =
            Command::new("sh").current_dir(&certificates.0).args(["-c", &make.concat()]).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let identity = Identity::from_directory(&certificates.0);
        if bits == "2048" {
            identity.unwrap();
            continue;
        }
        let said = identity.unwrap_err().to_string();
        assert!(said.contains(key.to_str().unwrap()) && said.contains("2048, 3072 or 4096"), "{said}");
    }
}

#[test]
fn swap_over_tls_and_an_unusable_certificate_are_refused_in_words() {
    let Some(certificates) = Certificates::new("words") else { return };
    let identity = Arc::new(Identity::from_directory(&certificates.0).unwrap());
    let listen = [Listen::Tls { host: "127.0.0.1".into(), port: 0, identity }];
    let config = Config { swap: true, connections: 2, ..few() };
    let refused = Server::start(&volume(256), &config, &listen, &to_stderr(Level::Warning)).unwrap_err();
    assert!(
        matches!(&refused, ServeError::Config(text) if text.contains("so swap on it can deadlock; use a unix socket")),
        "{refused}"
    );

    std::fs::copy(certificates.0.join("ca-key.pem"), certificates.0.join("server-key.pem")).unwrap();
    let error = Identity::from_directory(&certificates.0).unwrap_err().to_string();
    assert!(error.contains("cannot be used"), "{error}");
    std::fs::remove_file(certificates.0.join("server-cert.pem")).unwrap();
    let error = Identity::from_directory(&certificates.0).unwrap_err().to_string();
    assert!(error.contains("server-cert.pem") && error.contains("server-key.pem"), "{error}");
}

#[test]
fn a_ca_that_cannot_be_looked_at_lets_nobody_in_and_none_is_told_of() {
    let Some(certificates) = Certificates::new("dangling") else { return };
    let ca = certificates.0.join("ca-cert.pem");
    assert!(Identity::from_directory(&certificates.0).unwrap().checks_clients());
    std::fs::rename(&ca, certificates.0.join("elsewhere.pem")).unwrap();
    assert!(!Identity::from_directory(&certificates.0).unwrap().checks_clients());
    std::os::unix::fs::symlink("/nowhere/ca-cert.pem", &ca).unwrap();
    let error = Identity::from_directory(&certificates.0).unwrap_err().to_string();
    assert!(error.contains("ca-cert.pem"), "{error}");
}
