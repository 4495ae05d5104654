// SPDX-License-Identifier: Apache-2.0
//! A lab of three nodes whose leases are Node objects, its agents with the tokens of a service account.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use weft_lab::netns::checked;
use weft_lab::node::Node;
use weft_lab::{BackendKind, Families, Lab, LabOptions, StoreKind, wait_for};

use crate::exe::weft_exe;
use crate::relay::{ADDRESS, ADDRESS_V6, Relay};
use crate::server::{Cluster, Server};
pub use crate::thread::on_this_thread;

/// The path of ClusterRoleBindings.
pub const BINDINGS: &str = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";

/// How long to wait for a condition at most. The machine may be busy with other tests.
pub const LIMIT: Duration = Duration::from_secs(120);

pub struct Site {
    pub lab: Lab,
    pub cluster: Cluster,
    pub relay: Relay,
    /// The families of the Nodes' pod CIDRs.
    pub families: Families,
}

/// Returns subnet number N of each of the lab's networks.
fn cidrs(number: u8, families: Families) -> Vec<String> {
    let v4 = (families != Families::V6).then(|| format!("10.244.{number}.0/24"));
    let v6 = (families != Families::V4).then(|| format!("fd00:10:244:{number}::/64"));
    v4.into_iter().chain(v6).collect()
}

/// Returns the binding that gives the agents' account its rights.
pub fn binding(cluster: &Cluster) -> Value {
    json!({
        "metadata": {"name": format!("weft-{}", cluster.name)},
        "subjects": [{"kind": "ServiceAccount", "name": cluster.name, "namespace": "default"}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "tests"},
    })
}

/// Returns the flags of the store, for agents and commands.
fn flags(cluster: &Cluster) -> Vec<String> {
    vec![
        "--kube-subnet-mgr".to_owned(),
        format!("--kubeconfig-file={}", cluster.conf.path().join("config").display()),
        format!("--kube-annotation-prefix={}.weft.test", cluster.name),
        format!("--net-config-path={}", cluster.conf.path().join("net-conf.json").display()),
    ]
}

impl Site {
    /// Builds nodes 1 to 3 and their Node objects. No agent runs yet.
    pub async fn build(backend: BackendKind, dual: bool) -> Result<Site> {
        Site::build_with(LabOptions { backend, ipv6: dual, ..LabOptions::default() }).await
    }

    /// Builds nodes without IPv4 addresses. They reach the API server by IPv6.
    pub async fn build_only_ipv6(backend: BackendKind) -> Result<Site> {
        let options = LabOptions { backend, only_ipv6: true, store: StoreKind::Dir, ..LabOptions::default() };
        let site = Site::build_with(options).await?;
        for node in &site.lab.nodes {
            node.ns.ip("-4 addr flush dev eth0").await?;
        }
        Ok(site)
    }

    async fn build_with(options: LabOptions) -> Result<Site> {
        let options = LabOptions { exe: Some(weft_exe()), ..options };
        let mut lab = Lab::build(&options).await?;
        let cluster = Cluster::new(Server::shared().await).await;
        let mut relay = Relay::new(cluster.server.port());
        relay.open()?;
        fs::write(cluster.conf.path().join("net-conf.json"), options.net_conf())?;
        let account = json!({"metadata": {"name": cluster.name}});
        cluster.post("/api/v1/namespaces/default/serviceaccounts", &account).await;
        cluster.post(BINDINGS, &binding(&cluster)).await;
        for (number, node) in (1..).zip(&mut lab.nodes) {
            node.set_flags(flags(&cluster));
            node.set_env("NODE_NAME", &cluster.node(number));
        }
        let site = Site { lab, cluster, relay, families: options.families() };
        for number in 1..=3 {
            site.create(number, number).await;
        }
        let token = site.token(&json!({})).await;
        fs::write(site.token_file(), token)?;
        site.write_kubeconfig()?;
        Ok(site)
    }

    /// Builds nodes, and waits until their agents are ready and they have pods.
    pub async fn start(backend: BackendKind, dual: bool) -> Result<Site> {
        let mut site = Site::build(backend, dual).await?;
        site.start_agents()?;
        site.lab.settle().await?;
        Ok(site)
    }

    pub fn start_agents(&mut self) -> Result<()> {
        self.lab.nodes.iter_mut().try_for_each(Node::start)
    }

    pub async fn stop_agents(&mut self, signal: Signal) -> Result<()> {
        for node in &mut self.lab.nodes {
            node.stop(signal).await?;
        }
        Ok(())
    }

    /// Creates the Node object of a node with the subnets of this number.
    pub async fn create(&self, node: u8, number: u8) {
        let cidrs = cidrs(number, self.families);
        self.cluster.create(node, &cidrs.iter().map(String::as_str).collect::<Vec<_>>()).await;
    }

    /// Creates the Node object of a peer that has no machine.
    pub async fn create_peer(&self, number: u8) {
        let name = |end: &str| self.cluster.annotation(end);
        let mut annotations = json!({
            name("kube-subnet-manager"): "true",
            name("backend-type"): "vxlan",
            name("backend-data"): format!(r#"{{"VNI":1,"VtepMAC":"0e:00:00:00:00:{number:02x}"}}"#),
            name("public-ip"): format!("192.168.77.{number}"),
        });
        if self.cluster_backend() == "host-gw" {
            annotations[name("backend-type")] = json!("host-gw");
            annotations[name("backend-data")] = json!("null");
            annotations[name("public-ipv6")] = json!(format!("fd77::{number}"));
        }
        let cidrs = cidrs(number, self.families);
        let cidrs: Vec<&str> = cidrs.iter().map(String::as_str).collect();
        self.cluster.create_as(&self.cluster.node(number), &cidrs, annotations).await;
    }

    fn cluster_backend(&self) -> String {
        let text = fs::read_to_string(self.net_conf()).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()["Backend"]["Type"].as_str().unwrap().to_owned()
    }

    pub fn net_conf(&self) -> PathBuf {
        self.cluster.conf.path().join("net-conf.json")
    }

    pub fn token_file(&self) -> PathBuf {
        self.cluster.conf.path().join("token")
    }

    /// Returns a token of the service account.
    pub async fn token(&self, spec: &Value) -> String {
        let path = format!("/api/v1/namespaces/default/serviceaccounts/{}/token", self.cluster.name);
        let request = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec});
        self.cluster.post(&path, &request).await["status"]["token"].as_str().unwrap().to_owned()
    }

    fn write_kubeconfig(&self) -> Result<()> {
        let address = if self.families == Families::V6 { ADDRESS_V6 } else { ADDRESS };
        let server = json!({
            "server": format!("https://{address}"),
            "certificate-authority": self.cluster.server.ca(),
        });
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": server}],
            "users": [{"name": "u", "user": {"tokenFile": self.token_file()}}],
        });
        fs::write(self.cluster.conf.path().join("config"), text.to_string()).context("write a kubeconfig")
    }

    /// Returns the value of a Node's annotation.
    pub async fn annotation(&self, node: u8, end: &str) -> Option<String> {
        let object = self.cluster.read(node).await;
        object["metadata"]["annotations"][self.cluster.annotation(end)].as_str().map(str::to_owned)
    }

    /// Waits until a Node's annotation has this value.
    pub async fn annotated(&self, node: u8, end: &str, wanted: Option<&str>) -> Result<()> {
        let what = format!("annotation {end} of node {node} to be {wanted:?}");
        self.until(&what, async || self.annotation(node, end).await.as_deref() == wanted).await
    }

    /// Returns status, reason and message of a Node's condition NetworkUnavailable.
    pub async fn condition(&self, node: u8) -> Option<[String; 3]> {
        let object = self.cluster.read(node).await;
        let all = object["status"]["conditions"].as_array()?.clone();
        let ours = all.into_iter().find(|condition| condition["type"] == "NetworkUnavailable")?;
        Some(["status", "reason", "message"].map(|key| ours[key].as_str().unwrap_or_default().to_owned()))
    }

    /// Waits until the condition has this status and reason.
    pub async fn conditioned(&self, node: u8, status: &str, reason: &str) -> Result<()> {
        let is = |there: Option<[String; 3]>| there.is_some_and(|it| it[0] == status && it[1] == reason);
        self.until(&format!("{reason} of node {node}"), async || is(self.condition(node).await)).await
    }

    /// Waits until all agents have said in their Nodes that the network is there. After that they write nothing as long as nothing changes.
    pub async fn conditions_written(&self) -> Result<()> {
        for node in 1..=3 {
            self.conditioned(node, "False", "FlannelIsUp").await?;
        }
        Ok(())
    }

    /// Waits until a node's kernel has (`there`) or does not have a route to subnet N with these words.
    pub async fn routed(&self, node: u8, number: u8, words: &str, there: bool) -> Result<()> {
        let node = &self.lab.nodes[usize::from(node) - 1];
        let prefix = cidrs(number, self.families).swap_remove(0);
        let what = format!("{}: route to {prefix} {words} to be {there}", node.name());
        let seen = async || {
            let family = if prefix.contains(':') { "-6" } else { "-4" };
            let out = node.ns.ip(&format!("{family} route show {prefix}")).await;
            out.is_ok_and(|text| (text.contains(&prefix) && text.contains(words)) == there)
        };
        self.until(&what, seen).await
    }

    /// Waits until `weft status` of a node has (`there`) or does not have a problem with these words.
    pub async fn problem(&self, node: u8, words: &str, there: bool) -> Result<()> {
        let node = &self.lab.nodes[usize::from(node) - 1];
        let said = async || {
            node.status_as::<weft::observe::status::Status>()
                .await
                .is_ok_and(|status| status.problems.iter().any(|problem| problem.text.contains(words)) == there)
        };
        self.until(&format!("{}: problem {words:?} to be {there}", node.name()), said).await
    }

    /// Runs a command of weft in a node's namespace with the flags of the store. Returns its output; an error contains it, too.
    pub async fn command(&self, node: u8, words: &[&str]) -> Result<String> {
        let place = &self.lab.nodes[usize::from(node) - 1];
        let mut command = place.ns.command(weft_exe());
        command.args(words).args(flags(&self.cluster)).env("NODE_NAME", self.cluster.node(node));
        checked(&mut command).await
    }

    /// Runs `weft cleanup` in a node's namespace.
    pub async fn cleanup(&self, node: u8, words: &[&str]) -> Result<String> {
        let place = &self.lab.nodes[usize::from(node) - 1];
        checked(place.ns.command(weft_exe()).arg("cleanup").args(words)).await
    }

    pub async fn until(&self, what: &str, reached: impl AsyncFn() -> bool) -> Result<()> {
        wait_for(what, LIMIT, reached).await.with_context(|| self.lab.logs(15))
    }

    /// Returns the resourceVersions of the Nodes, which show whether a Node was written.
    pub async fn versions(&self) -> Vec<String> {
        let mut all = Vec::new();
        for node in 1..=3 {
            all.push(self.cluster.read(node).await["metadata"]["resourceVersion"].to_string());
        }
        all
    }

    /// Checks that every pod reaches every other pod.
    pub async fn reach_all(&self) -> Result<()> {
        let matrix = self.lab.reach_all().await?;
        ensure!(matrix.len() == if self.families == Families::Dual { 12 } else { 6 }, "{} pings", matrix.len());
        Ok(())
    }
}
