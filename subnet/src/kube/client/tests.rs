// SPDX-License-Identifier: Apache-2.0
//! Which errors are refusals, which may pass, and when a new client is made.

use super::super::annotations::Prefix;
use super::super::fake::{Clock, Fake, FakeNode};
use super::super::{KubeStore, Who};
use super::{Access, Api, CALL_LIMIT, NO_SUCH_PATH, Proxies, remedy_of_connection};
use crate::retry::chain;
use crate::source::{Error, Source};

#[tokio::test]
async fn refusals_and_failures_that_may_pass_are_different_errors() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    for (code, wanted, words) in [
        (400, "refused", ""),
        (401, "away", "the credentials are not accepted"),
        (403, "refused", "RBAC: nodes get, list, watch and nodes/status patch"),
        (404, "missing", ""),
        (408, "away", ""),
        (409, "away", ""),
        (410, "away", ""),
        (422, "refused", ""),
        (429, "away", ""),
        (500, "away", ""),
        (503, "away", ""),
    ] {
        let (listed, ()) = tokio::join!(store.list(), async { fake.request().await.refuse(code, "a reason").await });
        let (kind, text) = match listed.unwrap_err() {
            Error::Refused { source, .. } => ("refused", source.to_string()),
            Error::Unavailable { source: Some(source), .. } => ("away", source.to_string()),
            Error::Missing(text) => ("missing", text),
            error => panic!("{code}: {error}"),
        };
        assert_eq!(kind, wanted, "{code}: {text}");
        assert!(text.contains(words) && (code == 404 || text.contains("a reason")), "{code}: {text}");
    }
}

#[tokio::test]
async fn the_refusal_of_a_policy_names_its_own_remedy() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    for (reason, words) in [
        ("ValidatingAdmissionPolicy 'weft-own-node': changes no annotations but its own", "policy.annotationPrefix"),
        ("ValidatingAdmissionPolicy 'weft-own-node': this token is not bound to this node", "NODE_NAME must be"),
        (
            "ValidatingAdmissionPolicy 'weft-own-node': this token is not bound to this node",
            "`weft lease rm` of another node needs an administrator's --kubeconfig-file",
        ),
        ("ValidatingAdmissionPolicy 'theirs' denied it", "an admission policy of the cluster"),
        ("admission webhook denied it", "an admission policy of the cluster"),
    ] {
        for code in [403, 422] {
            let (listed, ()) = tokio::join!(store.list(), async { fake.request().await.refuse(code, reason).await });
            match listed.unwrap_err() {
                Error::Refused { source, .. } => assert!(source.to_string().contains(words), "{source}"),
                error => panic!("{error}"),
            }
        }
    }
}

#[tokio::test]
async fn an_address_where_nothing_listens_names_the_next_command() {
    let mut fake = Fake::start().await;
    let access = Access { url: Some("http://127.0.0.1:1".to_owned()), ..Access::default() };
    let store = KubeStore { api: Api::new(access), ..fake.store() };
    let text = chain(&store.list().await.unwrap_err());
    assert!(text.contains("(nothing listens there: check --kube-api-url or --kubeconfig-file, and in a pod"), "{text}");
    assert_eq!(text.matches("; curl -k http://127.0.0.1:1/readyz asks it again)").count(), 1, "{text}");
    // The server was reached. It says why it could not reach something else.
    let store = fake.store();
    let quoted = "failed calling webhook: dial tcp 10.0.0.7:443: connect: connection refused";
    let (listed, ()) = tokio::join!(store.list(), async { fake.request().await.refuse(500, quoted).await });
    let text = chain(&listed.unwrap_err());
    assert!(text.contains(quoted) && !text.contains("readyz"), "{text}");
}

#[test]
fn a_silent_address_and_a_name_without_an_address_name_the_next_command() {
    for (text, cause) in [
        ("client error (Connect): deadline has elapsed", "the firewalls on the way"),
        ("client error (Connect): tcp connect error: Host is unreachable (os error 113)", "the firewalls on the way"),
        ("client error (Connect): dns error: failed to lookup address information", "the DNS of this node"),
    ] {
        let said = remedy_of_connection("https://10.96.0.1/", text).unwrap_or_default();
        assert!(said.contains("check --kube-api-url") && said.contains(cause), "{text}: {said}");
        assert!(said.ends_with("; curl -k https://10.96.0.1/readyz asks it again)"), "{text}: {said}");
    }
    assert_eq!(remedy_of_connection("https://10.96.0.1/", "invalid peer certificate: UnknownIssuer"), None);
}

#[tokio::test]
async fn credentials_are_read_again_after_a_failure() {
    let (mut old, mut new) = (Fake::start().await, Fake::start().await);
    let store = old.store();
    let (listed, ()) = tokio::join!(store.list(), async { old.request().await.page(5, "", &[]).await });
    listed.unwrap();
    std::fs::copy(new.kubeconfig(), old.kubeconfig()).unwrap();
    // After an answer, the files are not read again. A rejected credential is an exception.
    let (listed, ()) = tokio::join!(store.list(), async { old.request().await.refuse(403, "no").await });
    listed.unwrap_err();
    let (listed, ()) = tokio::join!(store.list(), async { old.request().await.refuse(401, "who?").await });
    listed.unwrap_err();
    let nodes = [FakeNode::new(2, 5)];
    let (listed, ()) = tokio::join!(store.list(), async { new.request().await.page(5, "", &nodes).await });
    assert_eq!(listed.unwrap().len(), 1, "the list must come from the new server");
    new.close().await;
    std::fs::copy(Fake::start().await.kubeconfig(), old.kubeconfig()).unwrap();
    store.list().await.unwrap_err();
    let mut third = Fake::start().await;
    std::fs::copy(third.kubeconfig(), old.kubeconfig()).unwrap();
    let (listed, ()) = tokio::join!(store.list(), async { third.request().await.page(5, "", &nodes).await });
    assert_eq!(listed.unwrap().len(), 1, "the list must come from the third server");
}

/// Saved peers are used only for the store that they were saved for.
#[tokio::test]
async fn clusters_nodes_and_annotation_prefixes_have_fingerprints_of_their_own() {
    let (fake, other) = (Fake::start().await, Fake::start().await);
    let first = fake.store().fingerprint().await.expect("a fingerprint");
    assert!(first.contains(&fake.url()), "{first}");
    assert_eq!(fake.store().fingerprint().await.as_ref(), Some(&first));
    let others = [
        other.store(),
        KubeStore { who: Who::Node("n2".to_owned()), ..fake.store() },
        KubeStore { prefix: Prefix::new("b.test").unwrap(), ..fake.store() },
    ];
    for (at, store) in others.iter().enumerate() {
        let text = store.fingerprint().await;
        assert!(text.as_ref().is_some_and(|text| *text != first), "{at}: {text:?}");
    }
    std::fs::remove_file(fake.kubeconfig()).unwrap();
    assert_eq!(fake.store().fingerprint().await, None, "it is not known which cluster it is");
}

/// The server has the same address in many clusters, such as that of a Service.
#[tokio::test]
async fn clusters_whose_servers_have_one_address_differ_by_their_cas() {
    let dir = tempfile::tempdir().unwrap();
    let (path, ca) = (dir.path().join("config"), dir.path().join("ca.pem"));
    let kubeconfig = serde_json::json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://192.0.2.1:6443", "certificate-authority": ca}}],
        "users": [{"name": "u", "user": {}}],
    });
    std::fs::write(&path, kubeconfig.to_string()).unwrap();
    let mut texts = Vec::new();
    for body in ["AAAA", "BBBB", "AAAA"] {
        std::fs::write(&ca, format!("-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n")).unwrap();
        let api = Api::new(Access { kubeconfig: Some(path.clone()), ..Access::default() });
        texts.push(api.fingerprint().await.expect("a fingerprint"));
    }
    assert!(texts[0] != texts[1] && texts[0] == texts[2], "{texts:?}");
}

#[tokio::test]
async fn the_url_of_the_flag_counts_more_than_that_of_the_kubeconfig() {
    let (of_the_file, mut of_the_flag) = (Fake::start().await, Fake::start().await);
    let kubeconfig = Some(of_the_file.kubeconfig());
    let access = Access { url: Some(of_the_flag.url()), kubeconfig, ..Access::default() };
    let store = KubeStore { api: Api::new(access), ..of_the_file.store() };
    assert_eq!(store.describe(), format!("kubernetes {}", of_the_flag.url()));
    let nodes = [FakeNode::new(2, 5)];
    let (listed, ()) = tokio::join!(store.list(), async { of_the_flag.request().await.page(5, "", &nodes).await });
    assert_eq!(listed.unwrap().len(), 1);
}

#[tokio::test]
async fn the_proxy_of_a_kubeconfig_counts_more_than_that_of_the_environment() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config");
    let variable = |name: &str| (name == "HTTPS_PROXY").then(|| "http://10.0.0.9:3128".to_owned());
    for (of_cluster, wanted) in [
        (None, "http://10.0.0.9:3128/"),
        (Some(""), "http://10.0.0.9:3128/"),
        (Some("http://10.0.0.8:3128"), "http://10.0.0.8:3128/"),
    ] {
        let mut cluster = serde_json::json!({"server": "https://192.0.2.1:6443"});
        if let Some(url) = of_cluster {
            cluster["proxy-url"] = url.into();
        }
        let other = serde_json::json!({"server": "https://192.0.2.2:6443", "proxy-url": "http://10.0.0.7:3128"});
        let context = |name: &str| serde_json::json!({"name": name, "context": {"cluster": name, "user": "u"}});
        let kubeconfig = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [context("other"), context("c")],
            "clusters": [{"name": "other", "cluster": other}, {"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {}}],
        });
        std::fs::write(&path, kubeconfig.to_string()).unwrap();
        let proxies = Proxies::from_environment(variable);
        let api = Api::new(Access { kubeconfig: Some(path.clone()), proxies, ..Access::default() });
        let chosen = api.config().await.unwrap().proxy_url;
        assert_eq!(chosen.map(|uri| uri.to_string()).as_deref(), Some(wanted), "proxy-url: {of_cluster:?}");
    }
}

#[tokio::test]
async fn a_server_that_does_not_answer_leads_to_an_error() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let clock = Clock::stop();
    let silent = async {
        let request = fake.request().await;
        std::future::pending::<()>().await;
        drop(request);
    };
    let error = tokio::select! {
        listed = clock.until(store.list()) => listed.unwrap_err(),
        () = silent => unreachable!(),
    };
    let Error::Unavailable { source: Some(source), .. } = error else { panic!("{error}") };
    assert_eq!(source.to_string(), "no answer within 10 s");
}

/// The root of an API server exists, so a request for it would not say that the name is wrong.
#[tokio::test]
async fn a_node_name_that_fits_into_no_path_does_not_exist() {
    let mut fake = Fake::start().await;
    let store = KubeStore { who: Who::Node("no name".to_owned()), ..fake.store() };
    let (chosen, ()) = tokio::join!(store.chosen(), async {
        let request = fake.request().await;
        assert_eq!(request.path, NO_SUCH_PATH);
        request.refuse(404, "NotFound").await;
    });
    assert_eq!(chosen.unwrap_err().to_string(), "node no name does not exist");
}

/// After a boot nobody answers at the address of a Service. Until the agent gives up, it does not start with saved peers.
#[tokio::test]
async fn a_connection_is_given_up_long_before_a_request() {
    let fake = Fake::start().await;
    let api = Api::new(Access { kubeconfig: Some(fake.kubeconfig()), ..Access::default() });
    let limit = api.config().await.unwrap().connect_timeout;
    assert!(limit.is_some_and(|limit| limit <= CALL_LIMIT / 2), "{limit:?}");
}
