// SPDX-License-Identifier: Apache-2.0
//! Nothing is forgotten: failing delegates, repeated calls, records of flannel's plugin.

use std::fs;

use serde_json::{Value, json};

use crate::site::{Site, on_a_node, run};

/// Fails while a file of its verb's name is there; writes down what it was called for.
const MOODY: &str = r#"
cat >"$here/input"
echo "$CNI_COMMAND $CNI_CONTAINERID $CNI_IFNAME" >>"$here/calls"
echo "said to the log" >&2
if [ -e "$here/fail-$CNI_COMMAND" ]; then
    cat "$here/fail-$CNI_COMMAND"
    exit 7
fi
[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion":"1.0.0"}'
"#;

fn moody() -> impl Fn(Site, fn(&Site, &Value)) {
    |site, test| {
        site.script("moody", MOODY);
        site.pod("p1");
        let conf = site.conf(json!({"delegate": {"type": "moody"}}));
        test(&site, &conf);
    }
}

fn calls(site: &Site) -> Vec<String> {
    let text = fs::read_to_string(site.path("calls")).unwrap_or_default();
    let _ = fs::remove_file(site.path("calls"));
    text.lines().map(str::to_owned).collect()
}

#[test]
fn a_failed_add_is_taken_back_and_its_error_unchanged() {
    on_a_node(|site| {
        moody()(site, |site, conf| {
            let error = r#"{"cniVersion":"1.0.0","code":117,"msg":"no bridge","details":"at all"}"#;
            fs::write(site.path("fail-ADD"), error).unwrap();
            let answer = site.call("ADD", "p1", conf);
            assert_eq!(answer.error(), (117, "no bridge at all".to_owned()));
            assert!(answer.stderr.contains("said to the log"), "{}", answer.stderr);
            assert_eq!(calls(site), ["ADD id-p1 eth0", "DEL id-p1 eth0"]);
            assert_eq!(site.files("records"), Vec::<String>::new());
            // What cannot be taken back stays on record.
            fs::write(site.path("fail-DEL"), "").unwrap();
            assert_eq!(site.call("ADD", "p1", conf).error().0, 117);
            assert_eq!(site.files("records"), ["id-p1"]);
            fs::remove_file(site.path("fail-DEL")).unwrap();
            site.call("DEL", "p1", conf).fine();
            assert_eq!(site.files("records"), Vec::<String>::new());
        });
    });
}

#[test]
fn a_second_add_does_not_take_a_pod_down() {
    on_a_node(|site| {
        let conf = site.conf(json!({}));
        site.pod("p1");
        let result = site.call("ADD", "p1", &conf).fine().json();
        let answer = site.call("ADD", "p1", &conf);
        let (code, text) = answer.error();
        assert!(code == 999 && text.contains("already exists"), "{code} {text}");
        assert!(answer.stderr.contains("was there before: DEL takes it back"), "{}", answer.stderr);
        site.call("CHECK", "p1", &site.conf(json!({"prevResult": result}))).fine();
        site.call("DEL", "p1", &conf).fine();
        site.nothing_left();
    });
}

#[test]
fn a_del_with_the_hosts_namespace_leaves_the_hosts_interface() {
    on_a_node(|site| {
        let conf = site.conf(json!({}));
        site.pod("p1");
        site.call("ADD", "p1", &conf).fine();
        site.ip("netns del p1");
        site.ip("link add eth0 type bridge");
        let mut command = site.command("DEL", "p1", "eth0");
        command.env("CNI_NETNS", "/proc/self/ns/net");
        let answer = run(command, &conf).fine();
        assert!(answer.stderr.contains("is the plugin's own: the pod's is gone"), "{}", answer.stderr);
        site.ip("link show eth0");
        site.nothing_left();
    });
}

#[test]
fn a_failed_del_keeps_the_record_until_it_works() {
    on_a_node(|site| {
        moody()(site, |site, conf| {
            site.call("ADD", "p1", conf).fine();
            fs::write(site.path("fail-DEL"), "not json").unwrap();
            for _ in 0..2 {
                let (code, text) = site.call("DEL", "p1", conf).error();
                let wanted = "moody DEL failed: exit code 7 not json; said to the log";
                assert_eq!((code, text.as_str()), (999, wanted));
                assert_eq!(site.files("records"), ["id-p1"], "flannel's plugin forgets the pod here");
            }
            // A plugin that vanished is no success either.
            fs::rename(site.path("bin/moody"), site.path("away")).unwrap();
            let (_, text) = site.call("DEL", "p1", conf).error();
            assert!(text.contains("failed to find plugin \"moody\""), "{text}");
            fs::rename(site.path("away"), site.path("bin/moody")).unwrap();
            fs::remove_file(site.path("fail-DEL")).unwrap();
            // The configuration was broken since; the pod's namespace is gone.
            site.ip("netns del p1");
            let mut broken = conf.clone();
            broken["delegate"] = json!("nonsense");
            site.call("DEL", "p1", &broken).fine();
            assert_eq!(site.files("records"), Vec::<String>::new());
            assert!(site.call("DEL", "p1", conf).fine().stdout.is_empty(), "without a record there is nothing to do");
        });
    });
}

#[test]
fn interfaces_of_one_container_do_not_collide() {
    on_a_node(|site| {
        moody()(site, |site, conf| {
            for ifname in ["eth0", "net1", "net2"] {
                run(site.command("ADD", "p1", ifname), conf).fine();
            }
            assert_eq!(site.files("records"), ["id-p1", "id-p1:net1", "id-p1:net2"]);
            calls(site);
            for _ in 0..2 {
                run(site.command("DEL", "p1", "net1"), conf).fine();
            }
            assert_eq!(calls(site), ["DEL id-p1 net1"], "once, and never another interface's");
            assert_eq!(site.files("records"), ["id-p1", "id-p1:net2"]);
        });
    });
}

#[test]
fn records_of_flannels_plugin_are_found_and_cleaned() {
    on_a_node(|site| {
        moody()(site, |site, conf| {
            fs::create_dir(site.path("records")).unwrap();
            let theirs = json!({"cniVersion": "0.3.1", "name": "cbr0", "type": "moody", "mark": "flannel's"});
            let put = || fs::write(site.path("records/id-p1"), theirs.to_string()).unwrap();
            for ifname in ["eth0", "net1"] {
                put();
                run(site.command("DEL", "p1", ifname), conf).fine();
                assert_eq!(calls(site), [format!("DEL id-p1 {ifname}")]);
                let input: Value = serde_json::from_slice(&fs::read(site.path("input")).unwrap()).unwrap();
                assert_eq!(input, theirs);
                assert_eq!(site.files("records"), Vec::<String>::new());
            }
            // A record that cannot be read: said, success, kept.
            fs::write(site.path("records/id-p1"), "{torn").unwrap();
            let answer = site.call("DEL", "p1", conf).fine();
            assert!(answer.stderr.contains("is no JSON"), "{}", answer.stderr);
            assert_eq!((site.files("records"), calls(site)), (vec!["id-p1".to_owned()], vec![]));
        });
    });
}
