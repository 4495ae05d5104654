// SPDX-License-Identifier: Apache-2.0
//! The command line as Go's flag package reads it, brought into the form that clap reads. Pure: the flags that exist and the
//! environment are inputs.
//!
//! Rules of Go's `flag`: one dash or two; `-flag=value` or `-flag value`, where the value may itself begin with a dash; a boolean
//! takes its value only after `=`. Rule of flannel's `flagutil`: a flag that is not on the command line comes from
//! `FLANNELD_` + its name in capitals, `-` as `_`; an empty variable counts as not set.

use std::collections::BTreeMap;

/// Long names of the flags of one command, and whether each takes a value (a boolean takes none unless after `=`).
pub type Flags = BTreeMap<String, bool>;

/// The arguments after the command's name, as clap wants them: `--flag`, `--flag=value`, and everything else as it was.
pub fn normalize(args: &[String], flags: &Flags) -> Vec<String> {
    let mut out = Vec::with_capacity(args.len());
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        if arg == "--" {
            out.push(arg.clone());
            out.extend(args.by_ref().cloned());
            break;
        }
        let Some(name) = flag_name(arg) else {
            out.push(arg.clone());
            continue;
        };
        let dashed = format!("--{}", arg.trim_start_matches('-'));
        match flags.get(name) {
            Some(true) if !arg.contains('=') => match args.next() {
                Some(value) => out.push(format!("{dashed}={value}")),
                None => out.push(dashed),
            },
            Some(_) => out.push(dashed),
            // An unknown word after one dash: clap would read it as a bundle of short flags and name only its first letter.
            None if name.len() > 1 => out.push(dashed),
            None => out.push(arg.clone()),
        }
    }
    out
}

/// Appends what the environment says about flags that are not given, and returns (flag, variable) for each that it did.
pub fn add_env(args: &mut Vec<String>, flags: &Flags, env: impl Fn(&str) -> Option<String>) -> Vec<(String, String)> {
    let given: Vec<String> = args.iter().filter_map(|arg| flag_name(arg).map(str::to_owned)).collect();
    let mut added = Vec::new();
    for flag in flags.keys().filter(|flag| !given.contains(flag)) {
        let variable = variable(flag);
        if let Some(value) = env(&variable).filter(|value| !value.is_empty()) {
            args.push(format!("--{flag}={value}"));
            added.push((flag.clone(), variable));
        }
    }
    added
}

/// `subnet-file` -> `FLANNELD_SUBNET_FILE`.
pub fn variable(flag: &str) -> String {
    format!("FLANNELD_{}", flag.replace('-', "_").to_uppercase())
}

/// The name in `-name`, `--name`, `-name=value`; `None` for what is no flag.
fn flag_name(arg: &str) -> Option<&str> {
    let rest = arg.strip_prefix("--").or_else(|| arg.strip_prefix('-'))?;
    let name = rest.split('=').next().unwrap_or(rest);
    name.starts_with(|c: char| c.is_ascii_alphabetic()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags() -> Flags {
        let of = |(name, takes): &(&str, bool)| ((*name).to_owned(), *takes);
        let table = [("iface", true), ("ip-masq", false), ("v", true), ("vmodule", true), ("etcd-password", true)];
        table.iter().map(of).collect()
    }

    fn words(text: &str) -> Vec<String> {
        text.split(' ').filter(|word| !word.is_empty()).map(str::to_owned).collect()
    }

    #[test]
    fn go_forms_become_clap_forms() {
        let table = [
            ("-iface eth0", "--iface=eth0"),
            ("-iface=eth0", "--iface=eth0"),
            ("--iface eth0 --iface eth1", "--iface=eth0 --iface=eth1"),
            ("-ip-masq -iface=a", "--ip-masq --iface=a"),
            ("--ip-masq=false", "--ip-masq=false"),
            ("-v 4", "--v=4"),
            ("-v=4", "--v=4"),
            ("-vmodule=a=1", "--vmodule=a=1"),
            ("-etcd-password -secret", "--etcd-password=-secret"),
            ("-unknown", "--unknown"),
            ("-h -o json", "-h -o json"),
            ("-iface", "--iface"),
            ("-- -iface", "-- -iface"),
            ("word - 10", "word - 10"),
        ];
        for (given, wanted) in table {
            assert_eq!(normalize(&words(given), &flags()), words(wanted), "{given}");
        }
    }

    #[test]
    fn the_environment_fills_in_what_is_not_given() {
        let env = |name: &str| match name {
            "FLANNELD_IFACE" => Some("eth9".to_owned()),
            "FLANNELD_IP_MASQ" => Some("true".to_owned()),
            "FLANNELD_ETCD_PASSWORD" => Some(String::new()),
            _ => None,
        };
        let mut args = words("--iface=eth0");
        let added = add_env(&mut args, &flags(), env);
        assert_eq!(args, words("--iface=eth0 --ip-masq=true"));
        assert_eq!(added, vec![("ip-masq".to_owned(), "FLANNELD_IP_MASQ".to_owned())]);
        assert_eq!(variable("log_backtrace_at"), "FLANNELD_LOG_BACKTRACE_AT");
    }
}
