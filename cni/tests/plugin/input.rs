// SPDX-License-Identifier: Apache-2.0
//! The configuration that the delegate gets, as docs/flannel-formats.md, "The CNI plugin", describes it. If the
//! environment variable `FLANNEL_CNI` names the executable of flannel's own plugin, that plugin is tested with the same
//! rows.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::site::{Site, on_a_node};

const RECORDER: &str = r#"
cat >"$here/input"
env | grep ^CNI_ | grep -v ^CNI_PATH | sort >"$here/env"
echo '{"cniVersion":"0.3.1","ips":[],"unknown":"as it is"}'
"#;

const V4: &str = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.1.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";
const V6: &str =
    "FLANNEL_IPV6_NETWORK=fd05::/48\nFLANNEL_IPV6_SUBNET=fd05:0:0:1::1/64\nFLANNEL_MTU=1430\nFLANNEL_IPMASQ=false\n";
const MANY: &str = "FLANNEL_NETWORK=10.5.0.0/16,10.6.0.0/16,10.5.0.0/16\nFLANNEL_SUBNET=10.5.1.1/24\n\
    FLANNEL_IPV6_NETWORK=fd05::/48,fd06::/48\nFLANNEL_IPV6_SUBNET=fd05:0:0:1::1/64\nFLANNEL_MTU=8950\nFLANNEL_IPMASQ=true\n";

/// Each row: its title, keys of the network configuration, subnet.env, and the configuration that the delegate must
/// get.
fn rows() -> Vec<(&'static str, Value, &'static str, Value)> {
    let ipam =
        json!({"type": "host-local", "ranges": [[{"subnet": "10.5.1.0/24"}]], "routes": [{"dst": "10.5.0.0/16"}]});
    let bridge = json!({
        "cniVersion": "0.3.1", "name": "cbr0", "type": "bridge", "isGateway": true, "ipMasq": false, "mtu": 1450, "ipam": ipam,
    });
    let with = |more: Value, less: &[&str]| {
        let mut all = bridge.clone();
        for (key, value) in more.as_object().unwrap() {
            all[key] = value.clone();
        }
        less.iter().for_each(|key| drop(all.as_object_mut().unwrap().remove(*key)));
        all
    };
    let users_ipam = json!({"type": "other", "ranges": [[{"subnet": "1.2.3.0/24"}]], "routes": [{"dst": "0.0.0.0/0", "gw": "10.5.1.9"}], "x": 1});
    let filled_ipam = json!({
        "type": "other", "ranges": [[{"subnet": "10.5.1.0/24"}]], "x": 1,
        "routes": [{"dst": "0.0.0.0/0", "gw": "10.5.1.9"}, {"dst": "10.5.0.0/16"}],
    });
    let v6 =
        json!({"type": "host-local", "ranges": [[{"subnet": "fd05:0:0:1::/64"}]], "routes": [{"dst": "fd05::/48"}]});
    let many = json!({
        "type": "host-local", "ranges": [[{"subnet": "10.5.1.0/24"}], [{"subnet": "fd05:0:0:1::/64"}]],
        "routes": [{"dst": "10.5.0.0/16"}, {"dst": "10.6.0.0/16"}, {"dst": "fd05::/48"}, {"dst": "fd06::/48"}],
    });
    let capabilities =
        json!({"portMappings": [{"hostPort": 1}], "bandwidth": {"ingressRate": 1}, "ips": ["10.5.1.3/24"]});
    vec![
        ("defaults", json!({}), V4, bridge.clone()),
        ("no cniVersion", json!({"cniVersion": null}), V4, with(json!({}), &["cniVersion"])),
        ("an empty cniVersion", json!({"cniVersion": ""}), V4, with(json!({}), &["cniVersion"])),
        (
            "the keys of flannel's manifest",
            json!({"delegate": {"hairpinMode": true, "isDefaultGateway": true}}),
            V4,
            with(json!({"hairpinMode": true, "isDefaultGateway": true}), &[]),
        ),
        (
            "the user's values are kept",
            json!({"delegate": {"mtu": 1400, "ipMasq": true, "isGateway": false}}),
            V4,
            with(json!({"mtu": 1400, "ipMasq": true, "isGateway": false}), &[]),
        ),
        ("another delegate", json!({"delegate": {"type": "ptp"}}), V4, with(json!({"type": "ptp"}), &["isGateway"])),
        ("capabilities", json!({"runtimeConfig": capabilities}), V4, with(json!({"runtimeConfig": capabilities}), &[])),
        ("the user's ipam", json!({"ipam": users_ipam}), V4, with(json!({"ipam": filled_ipam}), &[])),
        ("no prevResult", json!({"prevResult": {"cniVersion": "0.3.1", "ips": []}}), V4, bridge.clone()),
        ("IPv6, the delegate masquerades", json!({}), V6, with(json!({"ipMasq": true, "mtu": 1430, "ipam": v6}), &[])),
        ("both, several networks", json!({}), MANY, with(json!({"mtu": 8950, "ipam": many}), &[])),
        (
            "a key in another case",
            json!({"Delegate": {"type": "ptp"}}),
            V4,
            with(json!({"type": "ptp"}), &["isGateway"]),
        ),
    ]
}

/// Returns the network configuration of a row. A null removes a key.
fn conf(site: &Site, row: &Value) -> Value {
    let mut conf = site.conf(json!({"cniVersion": "0.3.1"}));
    conf.as_object_mut().unwrap().remove("ipam");
    for (key, value) in row.as_object().unwrap() {
        conf[key] = value.clone();
    }
    conf.as_object_mut().unwrap().retain(|_, value| !value.is_null());
    conf
}

fn read(site: &Site, file: &str) -> Value {
    serde_json::from_slice(&fs::read(site.path(file)).unwrap()).unwrap()
}

/// Tests all rows. `bin/flannel` is the plugin to test.
fn check_rows(site: &Site, ours: bool) {
    for name in ["bridge", "ptp"] {
        site.script(name, RECORDER);
    }
    for (title, row, env, wanted) in rows() {
        site.subnet_env(env);
        let conf = conf(site, &row);
        let added = site.call("ADD", "p1", &conf).success();
        assert_eq!(read(site, "input"), wanted, "{title}");
        let vars = "CNI_COMMAND=ADD\nCNI_CONTAINERID=id-p1\nCNI_IFNAME=eth0\nCNI_NETNS=/run/netns/p1\n";
        assert_eq!(fs::read_to_string(site.path("env")).unwrap(), vars, "{title}");
        let mut record = read(site, "records/id-p1");
        if ours {
            assert_eq!(added.json()["unknown"], "as it is", "{title}");
            assert_eq!(record["weft"], json!({"ifname": "eth0", "netns": "/run/netns/p1", "args": ""}), "{title}");
            record.as_object_mut().unwrap().remove("weft");
        }
        assert!(
            added.stderr.contains("\"mtu\":"),
            "{title}: the log must contain the delegate's configuration: {}",
            added.stderr
        );
        assert_eq!(record, wanted, "{title}");
        fs::remove_file(site.path("run/subnet.env")).unwrap();
        site.call("DEL", "p1", &conf).success();
        assert_eq!(read(site, "input"), wanted, "{title}: DEL must use the recorded configuration without subnet.env");
        assert!(fs::read_to_string(site.path("env")).unwrap().contains("CNI_COMMAND=DEL"), "{title}");
        assert_eq!(site.files("records"), Vec::<String>::new(), "{title}");
    }
}

/// Each of the two plugins must be able to remove what the other one added.
fn check_that_each_plugin_removes_the_others_pods(site: &Site, theirs: &Path) {
    for name in ["bridge", "ptp"] {
        fs::remove_file(site.path("bin").join(name)).unwrap();
    }
    site.subnet_env(MANY);
    let ours = Path::new(env!("CARGO_BIN_EXE_weft-cni"));
    for (adds, removes) in [(ours, theirs), (theirs, ours)] {
        site.install(adds);
        site.call("ADD", "p1", &site.conf(json!({}))).success();
        site.install(removes);
        site.call("DEL", "p1", &site.conf(json!({}))).success();
        site.nothing_left();
    }
}

#[test]
fn the_delegate_gets_the_configuration_that_flannels_plugin_gives_it() {
    on_a_node(|site| {
        site.pod("p1");
        check_rows(&site, true);
    });
}

/// Running flannel's own plugin shows that the table is right.
#[test]
#[ignore = "needs FLANNEL_CNI"]
fn flannels_plugin_gives_the_delegate_the_same() {
    let theirs = std::env::var_os("FLANNEL_CNI").expect("set FLANNEL_CNI=/path/to/flannel to run this test");
    on_a_node(move |site| {
        site.pod("p1");
        site.install(theirs.as_ref());
        check_rows(&site, false);
        check_that_each_plugin_removes_the_others_pods(&site, theirs.as_ref());
    });
}

#[test]
fn only_root_can_read_records() {
    use std::os::unix::fs::PermissionsExt;
    on_a_node(|site| {
        site.script("bridge", RECORDER);
        site.pod("p1");
        site.call("ADD", "p1", &site.conf(json!({}))).success();
        let mode = |path: &str| fs::metadata(site.path(path)).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode("records"), mode("records/id-p1")), (0o700, 0o600));
    });
}
