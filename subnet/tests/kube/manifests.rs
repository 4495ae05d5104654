// SPDX-License-Identifier: Apache-2.0
//! deploy/kube and deploy/helm: the API server accepts both, and with default values they contain the same objects.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::OnceCell;
use weft_subnet::net_conf::NetConf;

use super::server::{Server, binary};

fn deploy(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(name)
}

fn run(command: &mut Command, stdin: &str) -> Output {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // This does not block: the text fits into the pipe, or the program reads while we write.
    child.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn text(out: Output) -> String {
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// Runs kubectl as the cluster's admin, and returns its output.
pub fn kubectl(server: &Server, args: &str, stdin: &str) -> String {
    let mut kubectl = Command::new(binary("kubectl"));
    kubectl.env("KUBECONFIG", server.kubeconfig("admin")).env("HOME", "/nonexistent");
    text(run(kubectl.args(args.split(' ')), stdin))
}

/// Renders the chart with these additional arguments. The error is helm's message.
fn chart(args: &str) -> Result<String, String> {
    let mut helm = Command::new(binary("helm"));
    helm.env("HOME", "/nonexistent").args(["template", "flannel", "--namespace", "kube-flannel"]);
    // A helm that is built without its Makefile assumes Kubernetes 1.20.
    if !args.contains("--kube-version") {
        helm.args(["--kube-version", include_str!("../../../tools/kube-version").trim()]);
    }
    let out = run(helm.arg(deploy("helm/weft")).args(args.split(' ').filter(|arg| !arg.is_empty())), "");
    if out.status.success() { Ok(text(out)) } else { Err(String::from_utf8(out.stderr).unwrap()) }
}

fn rendered() -> String {
    let mut kubectl = Command::new(binary("kubectl"));
    text(run(kubectl.arg("kustomize").arg(deploy("kube")), ""))
}

/// Returns objects in YAML as the server would store them, by kind and name. Namespaces are left out, because the chart has none.
fn accepted(server: &Server, yaml: &str) -> Vec<(String, Value)> {
    let objects: Vec<&str> = yaml.split("\n---\n").filter(|one| !one.contains("\nkind: Namespace\n")).collect();
    let said = kubectl(server, "create --dry-run=server -o json -f -", &objects.join("\n---\n"));
    let read = serde_json::Deserializer::from_str(&said).into_iter::<Value>();
    let mut all: Vec<(String, Value)> = read.map(|object| plain(object.unwrap())).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// Removes the fields that differ from call to call, and parses the JSON in a ConfigMap.
fn plain(mut object: Value) -> (String, Value) {
    let name = format!("{} {}", object["kind"], object["metadata"]["name"]);
    let metadata = object["metadata"].as_object_mut().unwrap();
    for key in ["uid", "creationTimestamp", "resourceVersion", "managedFields"] {
        metadata.remove(key);
    }
    for (_, value) in object["data"].as_object_mut().into_iter().flatten() {
        *value = serde_json::from_str(value.as_str().unwrap()).unwrap();
    }
    (name, object)
}

/// Both renderings as the shared server accepts them before `kubectl apply -k deploy/kube`.
struct Installed {
    kustomize: Vec<(String, Value)>,
    helm: Vec<(String, Value)>,
}

static INSTALLED: OnceCell<Installed> = OnceCell::const_new();

/// Returns the shared server after deploy/kube was applied to it.
pub async fn server() -> Arc<Server> {
    let server = Server::shared().await;
    installed(&server).await;
    server
}

async fn installed(server: &Server) -> &'static Installed {
    let install = || async {
        kubectl(server, "create namespace kube-flannel", "");
        let (kustomize, helm) = (accepted(server, &rendered()), accepted(server, &chart("").unwrap()));
        let said = kubectl(server, &format!("apply -k {}", deploy("kube").display()), "");
        assert!(said.contains("daemonset.apps/kube-flannel-ds created"), "{said}");
        Installed { kustomize, helm }
    };
    INSTALLED.get_or_init(install).await
}

#[tokio::test]
async fn manifest_and_chart_are_the_same_objects() {
    let server = Server::shared().await;
    let installed = installed(&server).await;
    let names = |all: &[(String, Value)]| all.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&installed.kustomize), names(&installed.helm));
    let kinds: Vec<_> = installed.kustomize.iter().map(|(_, object)| object["kind"].as_str().unwrap()).collect();
    let wanted = [
        "ClusterRole",
        "ClusterRoleBinding",
        "ConfigMap",
        "DaemonSet",
        "Role",
        "RoleBinding",
        "ServiceAccount",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
        "ValidatingAdmissionPolicyBinding",
    ];
    assert_eq!(kinds, wanted);
    for ((name, ours), (_, theirs)) in installed.kustomize.iter().zip(&installed.helm) {
        assert_eq!(ours, theirs, "{name}");
    }
}

#[tokio::test]
async fn the_agent_has_no_more_rights_than_it_needs() {
    let server = server().await;
    let of_nodes = ["nodes [] [] [get list watch]", "nodes/status [] [] [patch]"];
    let events = "events.events.k8s.io [] [] [create patch]";
    for (namespace, more) in [("default", Some(events)), ("kube-flannel", None), ("kube-system", None)] {
        let may = "auth can-i --list --as=system:serviceaccount:kube-flannel:weft --no-headers";
        let list = kubectl(&server, &format!("{may} --namespace {namespace}"), "");
        let mut rights: Vec<String> =
            list.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        // Leave out what the server allows everybody.
        rights.retain(|line| !line.starts_with('[') && !line.starts_with("selfsubject"));
        rights.sort();
        assert_eq!(rights, more.into_iter().chain(of_nodes).collect::<Vec<_>>(), "{namespace}: {list}");
    }
    let set: Value = serde_json::from_str(&kubectl(&server, "get daemonset -n kube-flannel -o json", "")).unwrap();
    let pod = &set["items"][0]["spec"]["template"]["spec"];
    let hardened = |capabilities: Value| json!({"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": capabilities});
    assert_eq!(
        pod["containers"][0]["securityContext"],
        hardened(json!({"add": ["NET_ADMIN", "NET_RAW"], "drop": ["ALL"]}))
    );
    let installer = hardened(json!({"add": ["DAC_OVERRIDE"], "drop": ["ALL"]}));
    assert_eq!(pod["initContainers"][0]["securityContext"], installer);
    // The usual type of containers may not write into directories of the node where SELinux is enforced.
    let selinux = json!({"level": "s0", "type": "spc_t"});
    let wanted = json!({"seccompProfile": {"type": "RuntimeDefault"}, "seLinuxOptions": selinux});
    assert_eq!(pod["securityContext"], wanted);
    assert!(!chart("--set flannel.seLinuxOptions=null").unwrap().contains("seLinux"));
}

/// Returns net-conf.json from the chart with these values.
async fn net_conf(args: &str) -> Value {
    let server = server().await;
    let yaml = chart(args).unwrap();
    let config = yaml.split("\n---\n").find(|one| one.contains("kind: ConfigMap")).unwrap();
    let said = kubectl(&server, "apply --dry-run=server -o json -f -", config);
    let (_, object) = plain(serde_json::from_str(&said).unwrap());
    let conf = object["data"]["net-conf.json"].clone();
    NetConf::parse(&conf.to_string()).unwrap_or_else(|error| panic!("{args}: {conf}: {error}"));
    conf
}

#[tokio::test]
async fn values_of_flannels_chart_are_in_net_conf() {
    for (args, wanted) in [
        ("", json!({"Network": "10.244.0.0/16", "Backend": {"Type": "vxlan"}})),
        (
            "--set podCidr=10.42.0.0/16,podCidrv6=fd42::/48,flannel.backend=host-gw,flannel.directRouting=true",
            json!({
                "Network": "10.42.0.0/16", "EnableIPv6": true, "IPv6Network": "fd42::/48", "Backend": {"Type": "host-gw"},
            }),
        ),
        (
            "--set podCidr=,podCidrv6=fd42::/48,flannel.enableNFTables=true",
            json!({
                "EnableIPv4": false, "EnableIPv6": true, "IPv6Network": "fd42::/48", "EnableNFTables": true,
                "Backend": {"Type": "vxlan"},
            }),
        ),
        (
            "--set flannel.backendPort=8473,flannel.vni=7,flannel.GBP=true,flannel.directRouting=true,flannel.mtu=1400",
            json!({
                "Network": "10.244.0.0/16",
                "Backend": {
                    "Type": "vxlan", "Port": 8473, "VNI": 7, "GBP": true, "DirectRouting": true, "MTU": 1400,
                },
            }),
        ),
        (
            "--set flannel.backend=ipip,flannel.directRouting=true",
            json!({"Network": "10.244.0.0/16", "Backend": {"Type": "ipip", "DirectRouting": true}}),
        ),
        (
            "--set flannel.backend=udp,flannel.backendPort=9285,flannel.directRouting=true,flannel.vni=7",
            json!({"Network": "10.244.0.0/16", "Backend": {"Type": "udp", "Port": 9285}}),
        ),
        (
            "--set flannel.backend=extension,flannel.args={--kube-subnet-mgr,--allow-extension} \
             --set flannel.extension.PostStartupCommand=up,flannel.extension.Reconcile=30,flannel.extension.Shell=true",
            json!({
                "Network": "10.244.0.0/16",
                "Backend": {"Type": "extension", "PostStartupCommand": "up", "Reconcile": 30, "Shell": true},
            }),
        ),
        // The values of flannel's chart, where 0 means none.
        (
            "--set flannel.backend=wireguard,flannel.backendPort=0,flannel.psk=0,flannel.tunnelMode=separate",
            json!({"Network": "10.244.0.0/16", "Backend": {"Type": "wireguard", "Mode": "separate"}}),
        ),
        (
            "--set flannel.backend=wireguard,flannel.backendPort=51000,flannel.backendPortv6=51001,flannel.tunnelMode=auto \
             --set flannel.keepaliveInterval=25,flannel.mtu=1400,flannel.psk=secret,flannel.vni=7",
            json!({
                "Network": "10.244.0.0/16",
                "Backend": {
                    "Type": "wireguard", "ListenPort": 51000, "ListenPortV6": 51001, "Mode": "auto",
                    "PersistentKeepaliveInterval": 25, "MTU": 1400, "PSK": "secret",
                },
            }),
        ),
    ] {
        assert_eq!(net_conf(args).await, wanted, "{args}");
    }
}

/// flannel's chart writes psk between quotes whatever its type is, and tunnelMode, GBP and directRouting without, so that text counts as what
/// it says.
#[tokio::test]
async fn types_of_values_do_not_matter_where_they_do_not_in_flannels_chart() {
    for (args, wanted) in [
        (
            r#"--set flannel.backend=wireguard,flannel.psk=12345678,flannel.tunnelMode="ipv6""#,
            json!({"Network": "10.244.0.0/16", "Backend": {"Type": "wireguard", "PSK": "12345678", "Mode": "ipv6"}}),
        ),
        (
            "--set-string flannel.GBP=true,flannel.directRouting=false",
            json!({"Network": "10.244.0.0/16", "Backend": {"Type": "vxlan", "GBP": true}}),
        ),
        (
            "--set-string flannel.backend=udp,flannel.backendPort=0",
            json!({"Network": "10.244.0.0/16", "Backend": {"Type": "udp"}}),
        ),
    ] {
        assert_eq!(net_conf(args).await, wanted, "{args}");
    }
}

#[tokio::test]
async fn values_of_flannels_chart_are_in_the_daemonset() {
    let server = server().await;
    let set = |args: &str| -> Value {
        let yaml = chart(args).unwrap();
        let set = yaml.split("\n---\n").find(|one| one.contains("kind: DaemonSet")).unwrap();
        serde_json::from_str(&kubectl(&server, "apply --dry-run=server -o json -f -", set)).unwrap()
    };
    let pod = set("--set flannel.skipCNIConfigInstallation=true,flannel.healthz.port=0,flannel.nodeSelector.a=b,\
                   flannel.image.repository=r.test/weft,flannel.image.tag=x,flannel.cniBinDir=/bin,\
                   global.imagePullSecrets[0].name=s")["spec"]["template"]["spec"]
        .take();
    let agent = &pod["containers"][0];
    assert_eq!(agent["args"], json!(["--ip-masq", "--kube-subnet-mgr"]));
    assert_eq!(agent["image"], "r.test/weft:x");
    assert!(agent["livenessProbe"].is_null() && agent["readinessProbe"].is_null() && agent["ports"].is_null());
    assert!(!pod.to_string().contains("/etc/cni/net.d"), "{pod}");
    assert!(pod.to_string().contains(r#""hostPath":{"path":"/bin","#), "{pod}");
    assert_eq!(pod["nodeSelector"], json!({"a": "b"}));
    assert_eq!(pod["imagePullSecrets"], json!([{"name": "s"}]));
    // Helm takes such a tag for a number.
    let dated = set("--set flannel.image.tag=20260814")["spec"]["template"]["spec"].take();
    assert_eq!([&dated["initContainers"][0]["image"], &dated["containers"][0]["image"]], ["weft:20260814"; 2]);
    let ten = set("--set flannel.updateStrategy.rollingUpdate.maxUnavailable=10%")["spec"]["updateStrategy"].take();
    assert_eq!((&ten["type"], &ten["rollingUpdate"]["maxUnavailable"]), (&json!("RollingUpdate"), &json!("10%")));
    let by_hand = set("--set flannel.updateStrategy.type=OnDelete")["spec"]["updateStrategy"].take();
    assert_eq!(by_hand["type"], "OnDelete");
    let flags =
        |values: &str| set(&format!("--set {values}"))["spec"]["template"]["spec"]["containers"][0]["args"].take();
    let (cni, ip, port) = ("--cni-conf=/etc/kube-flannel/cni-conf.json", "--healthz-ip=0.0.0.0", "--healthz-port=8081");
    assert_eq!(flags("flannel.args={--kube-subnet-mgr}"), json!(["--kube-subnet-mgr", cni, ip, port]));
    let more = flags("flannel.args={--kube-subnet-mgr},flannel.logFormat=json,flannel.txChecksumOff=true");
    assert_eq!(more, json!(["--kube-subnet-mgr", "--log-format=json", "--tx-checksum-off", cni, ip, port]));
}

/// As with flannel's chart, the health port is open on all addresses of the node: monitoring outside of the node reads /metrics there. The
/// kubelet asks over loopback, which works whichever family the address of the pod has.
#[tokio::test]
async fn the_health_port_answers_outside_of_the_node_unless_its_address_is_given() {
    let server = server().await;
    for (values, flag, probed) in [
        ("flannel.backend=vxlan", "--healthz-ip=0.0.0.0", "127.0.0.1"),
        ("podCidrv6=fd42::/48", "--healthz-ip=0.0.0.0", "127.0.0.1"),
        // Nodes without IPv4.
        ("podCidr=,podCidrv6=fd42::/48", "--healthz-ip=::", "::1"),
        ("flannel.healthz.ip=127.0.0.1", "--healthz-ip=127.0.0.1", "127.0.0.1"),
        ("flannel.healthz.ip=10.0.0.7", "--healthz-ip=10.0.0.7", "10.0.0.7"),
        ("flannel.healthz.ip=::", "--healthz-ip=::", "::1"),
        // flannel's chart has no value for the address, so its users give the flag.
        ("flannel.args={--kube-subnet-mgr,--healthz-ip=127.0.0.1}", "--healthz-ip=127.0.0.1", "127.0.0.1"),
        ("flannel.args={-healthz-ip,10.0.0.7,--kube-subnet-mgr}", "--healthz-ip=10.0.0.7", "10.0.0.7"),
    ] {
        let yaml = chart(&format!("--set {values}")).unwrap();
        let set = yaml.split("\n---\n").find(|one| one.contains("kind: DaemonSet")).unwrap();
        let object: Value =
            serde_json::from_str(&kubectl(&server, "apply --dry-run=server -o json -f -", set)).unwrap();
        let agent = &object["spec"]["template"]["spec"]["containers"][0];
        let args = agent["args"].as_array().unwrap();
        let last = args.iter().rfind(|arg| arg.as_str().unwrap().contains("healthz-ip"));
        assert_eq!(last, Some(&json!(flag)), "{values}: {args:?}");
        for probe in ["livenessProbe", "readinessProbe"] {
            assert_eq!(agent[probe]["httpGet"]["host"], probed, "{values}: {probe}");
        }
    }
}

/// Users of flannel's chart write the port into the arguments, because it has no value for it.
#[tokio::test]
async fn the_flag_of_the_health_port_counts_for_the_probes_too() {
    let server = server().await;
    for (values, port) in [
        ("flannel.healthz.port=9000", Some(9000)),
        ("flannel.args={--kube-subnet-mgr,--healthz-port=9000}", Some(9000)),
        ("flannel.args={-healthz-port,9000,--kube-subnet-mgr}", Some(9000)),
        ("flannel.args={--kube-subnet-mgr,--healthz-port=0}", None),
    ] {
        let yaml = chart(&format!("--set {values}")).unwrap();
        let set = yaml.split("\n---\n").find(|one| one.contains("kind: DaemonSet")).unwrap();
        let object: Value =
            serde_json::from_str(&kubectl(&server, "apply --dry-run=server -o json -f -", set)).unwrap();
        let agent = &object["spec"]["template"]["spec"]["containers"][0];
        let args: Vec<&str> = agent["args"].as_array().unwrap().iter().map(|arg| arg.as_str().unwrap()).collect();
        let last = args.iter().rfind(|arg| arg.contains("healthz-port"));
        assert_eq!(last, Some(&&*format!("--healthz-port={}", port.unwrap_or(0))), "{values}: {args:?}");
        assert_eq!(agent["ports"][0]["containerPort"].as_i64(), port, "{values}");
        assert_eq!(agent["livenessProbe"].is_null(), port.is_none(), "{values}");
    }
}

/// Helm and kubectl take the files of a release as they take this tree.
#[tokio::test]
async fn the_files_of_a_release_are_the_same_objects() {
    let server = server().await;
    let home = tempfile::tempdir().unwrap();
    let mut tool = Command::new(deploy("../tools/manifests"));
    text(run(tool.arg(home.path()), ""));
    let file = |end: &str| home.path().join(format!("weft-{}-{end}", env!("CARGO_PKG_VERSION")));
    let objects = |yaml: &str| {
        let read = kubectl(&server, "create --dry-run=client -o json -f -", yaml);
        let read = serde_json::Deserializer::from_str(&read).into_iter::<Value>();
        read.map(|object| object.unwrap().to_string()).collect::<std::collections::BTreeSet<String>>()
    };
    let manifest = std::fs::read_to_string(file("kube.yml")).unwrap();
    assert_eq!(objects(&manifest), objects(&rendered()));
    let mut helm = Command::new(binary("helm"));
    helm.env("HOME", "/nonexistent").args(["template", "flannel", "--namespace", "kube-flannel"]);
    helm.args(["--kube-version", include_str!("../../../tools/kube-version").trim()]);
    assert_eq!(text(run(helm.arg(file("chart.tgz")), "")), chart("").unwrap());
}

/// All values of flannel's chart: those with a default, and those that its comments show. Only the image is weft's.
const FLANNELS_VALUES: &str = r#"
global: {imagePullSecrets: [{name: a-secret-name}]}
podCidr: "10.244.0.0/16"
podCidrv6: "fd00:10:244::/48"
flannel:
  flannel_cni: {image: {repository: flannel.test/flannel-cni-plugin, tag: v0}}
  cniBinDir: /opt/cni/bin
  cniConfDir: /etc/cni/net.d
  skipCNIConfigInstallation: false
  enableNFTables: false
  args: [--ip-masq, --kube-subnet-mgr]
  backend: vxlan
  backendPort: 0
  mtu: 1500
  vni: 1
  GBP: false
  directRouting: false
  macPrefix: "0E-2A"
  backendPortv6: 51821
  psk: 0
  tunnelMode: separate
  keepaliveInterval: 0
  cniConf: |
    {"name": "cbr0", "cniVersion": "0.3.1", "plugins": [{"type": "flannel", "delegate": {"isDefaultGateway": true}}]}
  resources: {requests: {cpu: 100m, memory: 50Mi}}
  healthz:
    port: 8081
    livenessProbe: {initialDelaySeconds: 10, periodSeconds: 30}
    readinessProbe: {initialDelaySeconds: 5, periodSeconds: 10}
  tolerations: [{effect: NoExecute, operator: Exists}, {effect: NoSchedule, operator: Exists}]
  nodeSelector: {}
netpol:
  enabled: true
  args: ["--hostname-override=$(MY_NODE_NAME)", --v=2]
  image: {repository: r.test/kube-network-policies, tag: v1.0.0}
"#;

#[tokio::test]
async fn every_value_of_flannels_chart_is_accepted_and_netpol_brings_its_engine() {
    let server = server().await;
    let home = tempfile::tempdir().unwrap();
    let values = home.path().join("values.yaml");
    std::fs::write(&values, FLANNELS_VALUES).unwrap();
    let yaml = chart(&format!("--values {}", values.display())).unwrap();
    let object = |kind: &str| -> Value {
        let one = yaml.split("\n---\n").find(|one| one.contains(&format!("kind: {kind}\n"))).unwrap();
        serde_json::from_str(&kubectl(&server, "apply --dry-run=server -o json -f -", one)).unwrap()
    };
    let pod = &object("DaemonSet")["spec"]["template"]["spec"];
    let engine = &pod["containers"][1];
    assert_eq!(engine["image"], "r.test/kube-network-policies:v1.0.0");
    assert_eq!(engine["args"], json!(["--hostname-override=$(MY_NODE_NAME)", "--v=2"]));
    assert_eq!(engine["securityContext"], json!({"privileged": true}));
    assert!(pod["volumes"].to_string().contains(r#""path":"/lib/modules""#), "{}", pod["volumes"]);
    assert_eq!(pod["imagePullSecrets"], json!([{"name": "a-secret-name"}]));
    let (_, config) = plain(object("ConfigMap"));
    assert_eq!(config["data"]["cni-conf.json"]["cniVersion"], "0.3.1");
    let rules = object("ClusterRole")["rules"].to_string();
    assert!(rules.contains("networkpolicies") && rules.contains("namespaces"), "{rules}");
    let without = chart("").unwrap();
    assert!(!without.contains("networkpolicies") && !without.contains("privileged: true"), "{without}");
}

/// The device belongs to the agent alone, and only with the backend that needs it.
#[tokio::test]
async fn the_agent_gets_the_tun_device_for_udp_alone() {
    let server = server().await;
    let objects = |yaml: &str| -> Vec<Value> {
        let sets = yaml.split("\n---\n").filter(|one| one.contains("kind: DaemonSet"));
        sets.map(|set| serde_json::from_str(&kubectl(&server, "apply --dry-run=server -o json -f -", set)).unwrap())
            .collect()
    };
    let mut kustomize = Command::new(binary("kubectl"));
    let overlay = text(run(kustomize.arg("kustomize").arg(deploy("kube-udp")), ""));
    for yaml in [chart("--set flannel.backend=udp").unwrap(), overlay] {
        let set = objects(&yaml).remove(0);
        let pod = &set["spec"]["template"]["spec"];
        let device = json!({"name": "tun", "hostPath": {"path": "/dev/net/tun", "type": "CharDevice"}});
        assert!(pod["volumes"].as_array().unwrap().contains(&device), "{pod}");
        let mount = json!({"name": "tun", "mountPath": "/dev/net/tun"});
        assert!(pod["containers"][0]["volumeMounts"].as_array().unwrap().contains(&mount), "{pod}");
        assert!(!pod["initContainers"][0].to_string().contains("/dev/net/tun"), "{pod}");
    }
    assert!(!chart("").unwrap().contains("/dev/net/tun"));
}

#[test]
fn the_chart_refuses_what_weft_does_not_have() {
    for (args, why) in [
        ("--set flannel.backend=ipsec", "weft has vxlan, host-gw, ipip, wireguard, udp, alloc and extension"),
        ("--set flannel.backend=extension", "add --allow-extension to flannel.args"),
        ("--set podCidr=", "podCidr and podCidrv6 are both empty"),
        ("--set flannel.image.repository=ghcr.io/flannel-io/flannel", "flannel.image is flannel's"),
        ("--set policy.annotationPrefix=a.test/b-", r#"annotations that begin with "flannel.alpha.coreos.com/""#),
        ("--set flannel.args={--kube-annotation-prefix=a.test/b}", "set policy.annotationPrefix=a.test/b-,"),
        ("--set flannel.args={-kube-annotation-prefix,a.test}", "set policy.annotationPrefix=a.test/,"),
    ] {
        let said = chart(args).expect_err(args);
        assert!(said.contains(why), "{args}: {said}");
    }
}

/// A misspelled value would have no effect, and the cluster would run with the default.
#[test]
fn the_chart_names_values_that_it_does_not_know_or_that_have_another_type() {
    for (args, why) in [
        ("--set flannel.backened=host-gw", "backened"),
        ("--set flannel.healthz.prot=1", "prot"),
        ("--set podCIDR=10.0.0.0/8", "podCIDR"),
        ("--set flannel.logFormat=klog", "logFormat"),
        ("--set flannel.args=--ip-masq", "args"),
        ("--set-string policy.enabled=false", "enabled"),
    ] {
        let said = chart(args).expect_err(args);
        assert!(
            said.contains("values don't meet the specifications of the schema") && said.contains(why),
            "{args}: {said}"
        );
    }
    // A chart that contains this one may switch it by a value, and shares its global values.
    for args in ["--set enabled=true", "--set global.registry=r.test", "--set-string flannel.backendPort=8472"] {
        assert!(chart(args).is_ok(), "{args}");
    }
    assert!(chart("--set-string flannel.backendPort=4789").unwrap().contains(r#""Port": 4789"#));
}

/// Each value that the templates read has a type in the schema, and each one of values.yaml, too.
#[test]
fn the_schema_of_the_chart_lists_every_value_that_a_template_reads() {
    let schema: Value =
        serde_json::from_str(&std::fs::read_to_string(deploy("helm/weft/values.schema.json")).unwrap()).unwrap();
    let mut read = 0;
    for template in std::fs::read_dir(deploy("helm/weft/templates")).unwrap() {
        let text = std::fs::read_to_string(template.unwrap().path()).unwrap();
        for path in text.split(".Values.").skip(1) {
            let end = path.find(|c: char| !c.is_alphanumeric() && c != '.' && c != '_').unwrap_or(path.len());
            let known = path[..end].split('.').try_fold(&schema, |schema, key| schema["properties"].get(key));
            assert!(known.is_some(), "{}", &path[..end]);
            read += 1;
        }
    }
    assert!(read > 50, "{read} values");
}

#[test]
fn the_policy_is_left_out_for_servers_without_policies() {
    let policy = |args: &str| chart(args).unwrap().contains("ValidatingAdmissionPolicy");
    assert!(!policy("--kube-version 1.29.14") && !policy("--set policy.enabled=false"));
    assert!(policy("--kube-version 1.30.0"));
    let args =
        "--set policy.annotationPrefix=a.test/b-,flannel.args={--kube-annotation-prefix=a.test/b} --namespace net";
    let other = chart(args).unwrap();
    assert!(other.contains(r#""a.test/b-""#) && other.contains("system:serviceaccount:net:weft"), "{other}");
}
