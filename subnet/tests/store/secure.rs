// SPDX-License-Identifier: Apache-2.0
//! TLS, client certificates and users, and the errors for flags that do not fit together.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use etcd_client::{Client, ConnectOptions, Permission, PermissionType};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use weft_subnet::etcd::{EtcdOptions, EtcdStore};
use weft_subnet::source::{Error, Event, Source};

use super::contract::{PATIENCE, attrs, next, request, until};
use super::failover::relay;
use super::server::{PREFIX, Server, free_port, options};

fn openssl(dir: &Path, command: &str) {
    let args: Vec<&str> = command.split_whitespace().collect();
    let out = Command::new("openssl").current_dir(dir).args(args).output().expect("these tests need openssl");
    assert!(out.status.success(), "{command}: {}", String::from_utf8_lossy(&out.stderr));
}

const EC: &str = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";

/// Creates a CA, a certificate for 127.0.0.1, and one for a client.
fn certificates(dir: &Path) {
    std::fs::write(dir.join("san"), "subjectAltName=IP:127.0.0.1\n").unwrap();
    authority(dir, "ca");
    for name in ["server", "client"] {
        certificate(dir, name, "ca");
    }
}

fn authority(dir: &Path, ca: &str) {
    openssl(dir, &format!("req -x509 {EC} -keyout {ca}.key -out {ca}.pem -days 2 -subj /CN={ca}"));
}

/// Creates NAME.key and NAME.pem, signed by this CA.
fn certificate(dir: &Path, name: &str, ca: &str) {
    openssl(dir, &format!("req {EC} -keyout {name}.key -out {name}.csr -subj /CN={name}"));
    let sign = format!("-CA {ca}.pem -CAkey {ca}.key -CAcreateserial -days 2 -extfile san");
    openssl(dir, &format!("x509 -req -in {name}.csr {sign} -out {name}.pem"));
}

/// Returns a store with a client certificate whose connection goes through a relay, and what the relay returns: its tasks, and the number of its
/// connections. The server and the store have answered.
async fn over_relay(server: &Server) -> (EtcdStore, JoinSet<()>, Arc<AtomicUsize>) {
    answers(&EtcdStore::new(with_client(server)).unwrap(), "the start").await;
    let (url, tasks, connections) = relay(server.port).await;
    let endpoints = vec![url.replace("http://", "https://")];
    let store = EtcdStore::new(EtcdOptions { endpoints, ..with_client(server) }).unwrap();
    answers(&store, "over the relay").await;
    (store, tasks, connections)
}

fn tls_server(extra: &[&str]) -> Server {
    Server::start_with("https", |dir| {
        certificates(dir);
        let file = |name: &str| dir.join(name).display().to_string();
        let mut args = vec!["--cert-file".into(), file("server.pem"), "--key-file".into(), file("server.key")];
        args.extend(extra.iter().map(|arg| if arg.ends_with(".pem") { file(arg) } else { (*arg).to_owned() }));
        args
    })
}

fn with_ca(server: &Server) -> EtcdOptions {
    EtcdOptions { ca_file: Some(server.dir.path().join("ca.pem")), ..options(vec![server.url()]) }
}

/// Acquires a lease, and waits for the server if it is not up yet.
async fn acquire(store: &EtcdStore) -> Result<(), Error> {
    let until = Instant::now() + PATIENCE;
    loop {
        match store.acquire(&request(1)).await {
            Err(Error::Unavailable { .. }) if Instant::now() < until => sleep(Duration::from_millis(50)).await,
            result => return result.map(|_| ()),
        }
    }
}

#[tokio::test]
async fn a_ca_alone_enables_tls() {
    let server = tls_server(&[]);
    acquire(&EtcdStore::new(with_ca(&server)).unwrap()).await.unwrap();
    let stranger = tempfile::tempdir().unwrap();
    certificates(stranger.path());
    let other = EtcdOptions { ca_file: Some(stranger.path().join("ca.pem")), ..with_ca(&server) };
    let error = EtcdStore::new(other).unwrap().list().await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "another CA is not believed: {error}");
}

#[tokio::test]
async fn a_client_certificate_is_presented() {
    let server = tls_server(&["--client-cert-auth", "--trusted-ca-file", "ca.pem"]);
    let file = |name: &str| Some(server.dir.path().join(name));
    let with = EtcdOptions { cert_file: file("client.pem"), key_file: file("client.key"), ..with_ca(&server) };
    acquire(&EtcdStore::new(with).unwrap()).await.unwrap();
    let error = EtcdStore::new(with_ca(&server)).unwrap().list().await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
}

fn with_client(server: &Server) -> EtcdOptions {
    let file = |name: &str| Some(server.dir.path().join(name));
    EtcdOptions { cert_file: file("client.pem"), key_file: file("client.key"), ..with_ca(server) }
}

/// Waits until the store answers.
async fn answers(store: &EtcdStore, what: &str) {
    let until = Instant::now() + PATIENCE;
    while let Err(error) = store.list().await {
        assert!(Instant::now() < until, "{what}: {}", weft_subnet::retry::chain(&error));
        sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn rotated_certificates_are_used_without_a_restart() {
    let mut server = tls_server(&["--client-cert-auth", "--trusted-ca-file", "ca.pem"]);
    let store = EtcdStore::new(with_client(&server)).unwrap();
    acquire(&store).await.unwrap();
    let lease = store.list().await.unwrap().remove(0).lease.unwrap();
    let (out, mut events) = mpsc::channel(64);
    let body = async {
        assert!(matches!(next(&mut events).await, Event::Snapshot { .. }));
        // CA, server and client have new certificates. Neither side accepts the old ones any more.
        server.end();
        certificates(server.dir.path());
        server.again();
        answers(&store, "after the rotation").await;
        store.retake(&lease.subnets, &attrs(1), &attrs(2)).await.unwrap();
        let told = until(&mut events, "the change of our lease", |event| matches!(event, Event::Changes(_))).await;
        let Event::Changes(changes) = told else { panic!("{told:?}") };
        assert_eq!(changes[0].written().unwrap().lease.as_ref().unwrap().attrs, attrs(2));
    };
    tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        () = body => {}
    }
}

/// etcd accepts both, because one CA signed them. But the old certificate may end soon, or be revoked.
#[tokio::test]
async fn a_new_certificate_is_used_at_once_although_the_connection_works() {
    let server = tls_server(&["--client-cert-auth", "--trusted-ca-file", "ca.pem"]);
    let (store, _tasks, connections) = over_relay(&server).await;
    let before = connections.load(Ordering::SeqCst);
    certificate(server.dir.path(), "client", "ca");
    store.list().await.unwrap();
    let after = connections.load(Ordering::SeqCst);
    assert!(after > before, "the new certificate is presented in a new connection");
    store.list().await.unwrap();
    assert_eq!(connections.load(Ordering::SeqCst), after, "which is then used");
}

/// The files are replaced one after the other, and before those of etcd.
#[tokio::test]
async fn an_incomplete_rotation_does_not_affect_the_connection() {
    let mut server = tls_server(&["--client-cert-auth", "--trusted-ca-file", "trusted.pem"]);
    let dir = server.dir.path().to_owned();
    std::fs::copy(dir.join("ca.pem"), dir.join("trusted.pem")).unwrap();
    let store = EtcdStore::new(with_client(&server)).unwrap();
    server.end();
    server.again();
    answers(&store, "the start").await;
    authority(&dir, "next");
    certificate(&dir, "new", "next");
    // First there is half a file, then the new certificate with the old key.
    let new = std::fs::read(dir.join("new.pem")).unwrap();
    for half in [&new[..new.len() / 2], &new] {
        std::fs::write(dir.join("client.pem"), half).unwrap();
        store.list().await.expect("the connection that works is not touched");
        // etcd restarts in between. The last valid files are presented to it.
        server.end();
        server.again();
        answers(&store, "a new connection half way").await;
    }
    // The files are complete, but etcd does not know that CA yet.
    std::fs::copy(dir.join("new.key"), dir.join("client.key")).unwrap();
    store.list().await.expect("the connection that works is not touched");
    // Now etcd accepts no other CA.
    std::fs::copy(dir.join("next.pem"), dir.join("trusted.pem")).unwrap();
    server.end();
    server.again();
    answers(&store, "the rotation is complete").await;
}

/// Otherwise each call would make one more connection, and log one more line, until somebody corrects the files.
#[tokio::test]
async fn changed_files_that_do_not_work_are_not_tried_again_with_each_call() {
    let server = tls_server(&["--client-cert-auth", "--trusted-ca-file", "ca.pem"]);
    let (store, _tasks, connections) = over_relay(&server).await;
    let (dir, before) = (server.dir.path(), connections.load(Ordering::SeqCst));
    // etcd does not know the CA of the new certificate.
    authority(dir, "next");
    certificate(dir, "client", "next");
    store.list().await.expect("the connection that works is not touched");
    let tried = connections.load(Ordering::SeqCst);
    assert!(tried > before, "the new certificate was tried");
    for _ in 0..3 {
        store.list().await.expect("the connection that works is not touched");
    }
    assert_eq!(connections.load(Ordering::SeqCst), tried);
}

/// Starts a server with authentication. The user `node` may write leases, the user `root` everything.
async fn server_with_users() -> Server {
    let server = Server::start().await;
    let mut client = server.client().await;
    client.user_add("root", "secret", None).await.unwrap();
    client.user_grant_role("root", "root").await.unwrap();
    client.role_add("flannel").await.unwrap();
    let all = Permission::new(PermissionType::Readwrite, PREFIX).with_prefix();
    client.role_grant_permission("flannel", all).await.unwrap();
    client.user_add("node", "word", None).await.unwrap();
    client.user_grant_role("node", "flannel").await.unwrap();
    client.auth_enable().await.unwrap();
    server
}

#[tokio::test]
async fn while_authentication_is_off_the_store_goes_on_without_its_user() {
    let mut server = server_with_users().await;
    let (username, password) = (Some("node".into()), Some("word".into()));
    let store = EtcdStore::new(EtcdOptions { username, password, ..options(vec![server.url()]) }).unwrap();
    let lease = store.acquire(&request(1)).await.unwrap();
    let (out, mut events) = mpsc::channel(64);
    let as_root = ConnectOptions::new().with_user("root", "secret");
    let body = async {
        assert!(matches!(next(&mut events).await, Event::Snapshot { .. }));
        Client::connect([server.url()], Some(as_root)).await.unwrap().auth_disable().await.unwrap();
        // The connections end, so the store has to log in again.
        server.end();
        server.again();
        answers(&store, "authentication is off").await;
        store.retake(&lease.subnets, &attrs(1), &attrs(2)).await.unwrap();
        let Event::Changes(changes) = next(&mut events).await else { panic!("the watch goes on") };
        assert_eq!(changes[0].written().unwrap().lease.as_ref().unwrap().attrs, attrs(2));
        server.client().await.auth_enable().await.unwrap();
        store.retake(&lease.subnets, &attrs(2), &attrs(3)).await.expect("the next call logs in");
        let Event::Changes(changes) = next(&mut events).await else { panic!("the watch goes on") };
        assert_eq!(changes[0].written().unwrap().lease.as_ref().unwrap().attrs, attrs(3));
    };
    tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        () = body => {}
    }
}

/// No other login helps, and each call must say so.
#[tokio::test]
async fn a_user_without_rights_is_refused_with_the_remedy() {
    let server = server_with_users().await;
    let (username, password) = (Some("node".into()), Some("word".into()));
    let elsewhere = EtcdOptions { username, password, prefix: "/other/network".into(), ..options(vec![server.url()]) };
    let store = EtcdStore::new(elsewhere).unwrap();
    for _ in 0..2 {
        let list = timeout(PATIENCE, store.list()).await.expect("it logs in again and again");
        let Err(Error::Refused { source: cause, .. }) = list else { panic!("{list:?}") };
        let text = cause.to_string();
        assert!(text.contains("check --etcd-username and --etcd-password, and the user's role"), "{text}");
    }
}

/// A login is a call, too, and the first one of each connection.
#[tokio::test]
async fn a_user_logs_in_at_the_next_endpoint_if_one_is_away() {
    let server = server_with_users().await;
    let endpoints = vec![format!("http://127.0.0.1:{}", free_port()), server.url()];
    let (username, password) = (Some("node".to_owned()), Some("word".to_owned()));
    let with_user =
        || EtcdOptions { username: username.clone(), password: password.clone(), ..options(endpoints.clone()) };
    EtcdStore::new(with_user()).unwrap().acquire(&request(1)).await.unwrap();
    let (out, mut events) = mpsc::channel(64);
    let store = EtcdStore::new(with_user()).unwrap();
    tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        event = next(&mut events) => {
            assert!(matches!(&event, Event::Snapshot { records, .. } if records.len() == 1), "{event:?}");
        }
    }
}

#[tokio::test]
async fn user_logs_in_again_after_a_restart() {
    let mut server = server_with_users().await;
    let user = |password: &str| {
        let given = (Some("node".into()), Some(password.into()));
        EtcdStore::new(EtcdOptions { username: given.0, password: given.1, ..options(vec![server.url()]) }).unwrap()
    };
    let (store, wrong) = (user("word"), user("wrong"));
    let Err(Error::Refused { source: cause, .. }) = wrong.list().await else { panic!("a wrong password") };
    assert!(cause.to_string().contains("--etcd-password"), "{cause}");
    let lease = store.acquire(&request(1)).await.unwrap();
    let (out, mut events) = mpsc::channel(64);
    let body = async {
        assert!(matches!(next(&mut events).await, Event::Snapshot { .. }));
        // The server keeps tokens in memory.
        server.end();
        server.again();
        let until = Instant::now() + PATIENCE;
        while let Err(error) = store.retake(&lease.subnets, &attrs(1), &attrs(2)).await {
            assert!(Instant::now() < until, "{error}");
            sleep(Duration::from_millis(50)).await;
        }
        let Event::Changes(changes) = next(&mut events).await else { panic!("the watch goes on") };
        assert_eq!(changes[0].written().unwrap().lease.as_ref().unwrap().attrs, attrs(2));
    };
    tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        () = body => {}
    }
}

/// A token that etcd has signed names the revision of its users. After any change of them it is too old. The next call must succeed, not
/// only the one after it.
#[tokio::test]
async fn a_signed_token_that_is_older_than_the_last_change_of_the_users_is_replaced() {
    let server = Server::start_with("http", |dir| {
        openssl(dir, "genrsa -out token.key 2048");
        openssl(dir, "rsa -in token.key -pubout -out token.pub");
        let file = |name: &str| dir.join(name).display().to_string();
        let keys = format!("priv-key={},pub-key={}", file("token.key"), file("token.pub"));
        vec!["--auth-token".to_owned(), format!("jwt,{keys},sign-method=RS256,ttl=1h")]
    });
    server.ready().await;
    let mut client = server.client().await;
    client.user_add("root", "secret", None).await.unwrap();
    client.user_grant_role("root", "root").await.unwrap();
    client.auth_enable().await.unwrap();
    let given = (Some("root".into()), Some("secret".into()));
    let with_user = EtcdOptions { username: given.0, password: given.1, ..options(vec![server.url()]) };
    let store = EtcdStore::new(with_user).unwrap();
    store.list().await.unwrap();
    let as_root = ConnectOptions::new().with_user("root", "secret").with_auto_token_refresh(true);
    let mut root = Client::connect([server.url()], Some(as_root)).await.unwrap();
    root.user_add("another", "word", None).await.unwrap();
    root.get("x", None).await.expect_err("the client alone does not log in again");
    store.list().await.unwrap();
}

/// The server of the test below. It runs in a process of its own, because the place of the system's CAs is a variable of the environment.
const SYSTEM: &str = "WEFT_TEST_ETCD_WITH_A_CA_OF_THE_SYSTEM";

#[tokio::test]
async fn without_a_ca_file_the_cas_of_the_system_count() {
    if let Some(url) = std::env::var_os(SYSTEM) {
        let url = url.into_string().unwrap();
        acquire(&EtcdStore::new(options(vec![url])).unwrap_or_else(|error| panic!("{error}"))).await.unwrap();
        return;
    }
    let server = tls_server(&[]);
    let again = |ca: &Path| {
        let name = "secure::without_a_ca_file_the_cas_of_the_system_count";
        let mut test = Command::new(std::env::current_exe().unwrap());
        test.args([name, "--exact", "--nocapture"]).env(SYSTEM, server.url());
        let out = test.env("SSL_CERT_FILE", ca).env("SSL_CERT_DIR", "/nonexistent").output().unwrap();
        let text = [out.stdout, out.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        assert!(text.contains("running 1 test"), "{text}");
        (out.status.success(), text)
    };
    let (works, text) = again(&server.dir.path().join("ca.pem"));
    assert!(works, "{text}");
    std::fs::write(server.dir.path().join("none.pem"), "").unwrap();
    let (works, text) = again(&server.dir.path().join("none.pem"));
    assert!(!works && text.contains("needs --etcd-cafile"), "{text}");
}

/// The first mistakes with a new cluster.
#[tokio::test]
async fn an_error_of_the_connection_names_what_is_probably_wrong() {
    let (tls, plain) = (tls_server(&[]), Server::start().await);
    acquire(&EtcdStore::new(with_ca(&tls)).unwrap()).await.unwrap();
    acquire(&EtcdStore::new(options(vec![plain.url()])).unwrap()).await.unwrap();
    let list = async |options| {
        let error = EtcdStore::new(options).unwrap().list().await.unwrap_err();
        weft_subnet::retry::chain(&error)
    };
    let says = |text: &str, remedy: &str| assert!(text.contains(remedy), "{text}");
    let nothing = list(options(vec!["http://127.0.0.1:1".into()])).await;
    says(&nothing, "(nothing listens there: check --etcd-endpoints, and whether etcd runs; weft doctor --check-store");
    let plain_to_tls = list(options(vec![tls.url().replace("https://", "http://")])).await;
    says(&plain_to_tls, "(if etcd speaks TLS there, write https:// in --etcd-endpoints, with --etcd-cafile)");
    let to_plain = EtcdOptions { endpoints: vec![plain.url().replace("http://", "https://")], ..with_ca(&tls) };
    says(&list(to_plain).await, "(if no TLS is spoken there, write http:// in --etcd-endpoints)");
    let stranger = tempfile::tempdir().unwrap();
    certificates(stranger.path());
    let another_ca = EtcdOptions { ca_file: Some(stranger.path().join("ca.pem")), ..with_ca(&tls) };
    says(&list(another_ca).await, "(its certificate must be signed by the CA of --etcd-cafile, and name this host)");
}

/// The line can be pasted.
#[tokio::test]
async fn a_missing_net_conf_names_the_command_that_writes_it() {
    let tls = tls_server(&[]);
    let store = EtcdStore::new(EtcdOptions { prefix: "/my/pods".into(), ..with_client(&tls) }).unwrap();
    answers(&store, "the server starts").await;
    let error = store.config().await.unwrap_err().to_string();
    let file = |name: &str| tls.dir.path().join(name).display().to_string();
    let files = format!("--cacert={} --cert={} --key={}", file("ca.pem"), file("client.pem"), file("client.key"));
    let net_conf = r#"'{"Network": "10.244.0.0/16", "Backend": {"Type": "vxlan"}}'"#;
    let command = format!("ETCDCTL_API=3 etcdctl --endpoints={} {files} put /my/pods/config {net_conf}", tls.url());
    let earlier = "if `etcdctl set` or ETCDCTL_API=2 wrote it, it is in etcd's store of version 2, which is not read";
    assert_eq!(error, format!("/my/pods/config does not exist: {earlier}; write it, for example: {command}"));
}

#[test]
fn an_endpoint_without_a_scheme_is_https_only_if_a_certificate_file_is_named() {
    let described = |options| EtcdStore::new(options).map(|store| store.describe()).unwrap();
    let endpoints = || vec![" 10.0.0.1:2379/".to_owned(), String::new(), "http://10.0.0.2:2379".to_owned()];
    let plain = described(options(endpoints()));
    assert_eq!(plain, "etcd http://10.0.0.1:2379,http://10.0.0.2:2379 /coreos.com/network");
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let file = |name: &str| Some(dir.path().join(name));
    let with_ca = EtcdOptions { ca_file: file("ca.pem"), ..options(endpoints()) };
    assert_eq!(described(with_ca), "etcd https://10.0.0.1:2379,http://10.0.0.2:2379 /coreos.com/network");
    let pair = EtcdOptions { cert_file: file("client.pem"), key_file: file("client.key"), ..options(endpoints()) };
    // A system without CA certificates cannot use it, which the error says of the same URL.
    let said = EtcdStore::new(pair).map_or_else(|error| error.to_string(), |store| store.describe());
    assert!(said.contains("https://10.0.0.1:2379"), "{said}");
}

/// Saved peers are used only for the store that they were saved for.
#[tokio::test]
async fn the_same_endpoints_in_another_order_are_the_same_store() {
    let fingerprint = async |endpoints: [&str; 2], prefix: &str| {
        let endpoints = endpoints.map(str::to_owned).to_vec();
        EtcdStore::new(EtcdOptions { prefix: prefix.into(), ..options(endpoints) })
            .unwrap()
            .fingerprint()
            .await
            .unwrap()
    };
    let (one, other) = ("http://10.0.0.1:2379", "http://10.0.0.2:2379");
    let store = fingerprint([one, other], PREFIX).await;
    assert_eq!(fingerprint([other, one], PREFIX).await, store);
    assert_ne!(fingerprint([one, "http://10.0.0.3:2379"], PREFIX).await, store);
    assert_ne!(fingerprint([one, other], "/my/pods").await, store);
}

#[test]
fn errors_name_the_flag_that_is_wrong() {
    let base = || options(vec!["https://127.0.0.1:1".into()]);
    let refusal = |options| match EtcdStore::new(options) {
        Err(Error::Invalid(text)) => text,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("accepted"),
    };
    let path = || Some(PathBuf::from("/nonexistent/file.pem"));
    assert!(refusal(EtcdOptions { cert_file: path(), ..base() }).starts_with("--etcd-certfile is given without"));
    assert!(refusal(EtcdOptions { key_file: path(), ..base() }).starts_with("--etcd-keyfile is given without"));
    assert!(refusal(EtcdOptions { ca_file: path(), ..base() }).starts_with("--etcd-cafile: cannot read"));
    assert!(refusal(EtcdOptions { username: Some("u".into()), ..base() }).contains("without --etcd-password"));
    assert!(refusal(EtcdOptions { password: Some("p".into()), ..base() }).contains("without --etcd-username"));
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("notes"), "-----BEGIN").unwrap();
    let notes = || Some(dir.path().join("notes"));
    assert!(refusal(EtcdOptions { ca_file: notes(), ..base() }).ends_with("notes is not a PEM file"));
    let empty = || Some(String::new());
    assert!(
        refusal(EtcdOptions { username: Some("u".into()), password: empty(), ..base() }).contains("--etcd-password")
    );
    let neither = EtcdOptions { username: empty(), password: empty(), ..options(vec!["http://127.0.0.1:1".into()]) };
    assert!(EtcdStore::new(neither).is_ok(), "empty flags count as absent");
    assert!(refusal(options(Vec::new())).contains("--etcd-endpoints is empty"));
    assert!(refusal(options(vec!["ftp://x".into()])).contains("neither http:// nor https://"));
}
